"""Fused SiLU and learnable relative positions (LRPE) of q and k, between linear attention's projection and its scan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.choices import LRPEForm
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES
from megalin.ops.dispatch.operands import Case, check_operands
from megalin.ops.dispatch.self_test import compare, few, sample
from megalin.ops.positions.encodings import check_pairs, lrpe_cosine, lrpe_rotation


def silu_lrpe(
    projection: Tensor,
    theta: Tensor | None,
    positions: Tensor,
    *,
    form: LRPEForm | None,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """Computes LRPE(silu(q)), LRPE(silu(k)) in `cosine` or `rotation` form (`ops.positions`); returns the other parts.

    Takes the parts as one tensor, so that the backward writes their gradients as one tensor for the projection's
    matmul, without a copy.

    Args:
        projection: [B, T, P, H, K], P from 2 to 4: q, k, then values and a gate.
        theta: [H, K] (cosine) or [H, K/2] (rotation), radians a token, fp32; None without a form.
        positions: [T] or [B, T], integers.
        form: None for SiLU alone.
        backend: implementation to run; compiled ones take fp32, bf16 and fp16.

    Returns:
        q and k, [B, T, H, 2K] (cosine) or [B, T, H, K], and views [B, T, H, K] of the parts after them, in the dtype
        of `projection`; the gradient of theta is summed in fp32, always in the same order.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    case = (*check_lrpe("silu_lrpe", projection, theta, positions, form), ("form", form))
    choice = backends.choose("silu_lrpe", backend, projection.device.type, _unsupported(projection, theta), case=case)
    if choice == "reference":
        return silu_lrpe_reference(projection, theta, positions, form=form)
    found: tuple[Tensor, ...] = _Parts.apply(projection.contiguous(), theta, positions, form)
    return found


def silu_lrpe_reference(
    projection: Tensor, theta: Tensor | None, positions: Tensor, *, form: LRPEForm | None
) -> tuple[Tensor, ...]:
    """Reference of `silu_lrpe` in plain PyTorch: tests the kernels and runs on CPUs."""
    q, k, *others = projection.unbind(2)
    q, k = (lrpe(functional.silu(x), theta, positions, form=form) for x in (q, k))
    return q, k, *others


def lrpe(x: Tensor, theta: Tensor | None, positions: Tensor, *, form: LRPEForm | None) -> Tensor:
    """LRPE of queries or keys x [B, T, H, K] in plain PyTorch; x itself without a form."""
    if theta is None:
        return x
    return lrpe_cosine(x, theta, positions) if form == "cosine" else lrpe_rotation(x, theta, positions)


def check_lrpe(op: str, projection: Tensor, theta: Tensor | None, positions: Tensor, form: LRPEForm | None) -> Case:
    """Raises OperandError for operands of `silu_lrpe` with incompatible shapes, dtypes or devices."""
    places = "T int" if positions.dim() == 1 else "BT int"
    frequencies = "HK" if form == "cosine" else "HF"
    operands = {"projection": (projection, "BTPHK"), "theta": (theta, frequencies), "positions": (positions, places)}
    case = check_operands(op, operands, "PHK")
    assert 2 <= projection.shape[2] <= 4, projection.shape
    assert (theta is None) == (form is None), form
    if theta is not None and form == "rotation":
        check_pairs(op, theta, projection.shape[4])
    return case


def _unsupported(projection: Tensor, theta: Tensor | None) -> str:
    if projection.dtype not in KERNEL_DTYPES:
        return f"dtype {projection.dtype}"
    if theta is not None and theta.dtype != torch.float32:
        return f"theta of {theta.dtype}"
    return "an empty tensor" if projection.numel() == 0 else ""


class _Parts(torch.autograd.Function):
    """Autograd function around the custom ops, as only it can return the unchanged parts as views."""

    @staticmethod
    def forward(
        ctx: Any, projection: Tensor, theta: Tensor | None, positions: Tensor, form: LRPEForm | None
    ) -> tuple[Tensor, ...]:
        ctx.form = form
        ctx.save_for_backward(projection, theta, positions)
        q, k, *others = projection.unbind(2)
        if theta is None:
            return functional.silu(q), functional.silu(k), *others
        assert form is not None
        return *_encode(projection, theta, positions, form), *others

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        projection, theta, positions = ctx.saved_tensors
        if theta is None:
            return _silu_backward(list(gradients), projection), None, None, None
        return *_backward(list(gradients), projection, theta, positions, ctx.form), None, None


def _fake_encode(projection: Tensor, _theta: Tensor, _positions: Tensor, form: str) -> tuple[Tensor, Tensor]:
    batch, length, _, heads, key = projection.shape
    shape = [batch, length, heads, key * (2 if form == "cosine" else 1)]
    return projection.new_empty(shape), projection.new_empty(shape)


@custom_op("silu_lrpe", _fake_encode)
def _encode(projection: Tensor, theta: Tensor, positions: Tensor, form: str) -> tuple[Tensor, Tensor]:
    from megalin._triton.positions import silu_lrpe as kernels

    codes = kernels.forward(
        projection.flatten(0, 1), theta.contiguous(), positions.flatten().contiguous(), rotation=form == "rotation"
    )
    return codes[0].unflatten(0, projection.shape[:2]), codes[1].unflatten(0, projection.shape[:2])


@custom_op("silu_lrpe_backward", lambda dy, x, theta, *_: (x.new_empty(x.shape), theta.new_empty(theta.shape)))
def _backward(
    gradients: list[Tensor], projection: Tensor, theta: Tensor, positions: Tensor, form: str
) -> tuple[Tensor, Tensor]:
    from megalin._triton.positions import silu_lrpe as kernels

    d_projection, d_theta = kernels.backward(
        [gradient.contiguous() for gradient in gradients],
        projection.flatten(0, 1),
        theta.contiguous(),
        positions.flatten().contiguous(),
        rotation=form == "rotation",
    )
    return d_projection.view(projection.shape), d_theta


@custom_op("silu_parts_backward", lambda gradients, x: x.new_empty(x.shape))
def _silu_backward(gradients: list[Tensor], projection: Tensor) -> Tensor:
    from megalin._triton.positions import silu_lrpe as kernels

    found = kernels.silu_backward([gradient.contiguous() for gradient in gradients], projection.flatten(0, 1))
    return found.view(projection.shape)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    heads, key, form = few(case["H"]), case["K"], case["form"]
    inputs = [sample(2, 16, case["P"], heads, key, device=device, dtype=case["projection"])]
    if form is not None:
        inputs.append(sample(heads, key if form == "cosine" else key // 2, device=device, seed=2).abs())
    positions = torch.arange(16, device=device, dtype=case["positions"]) ** 3

    def kernel(x: Tensor, theta: Tensor | None = None) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _Parts.apply(x, theta, positions, form)
        return found

    def reference(x: Tensor, theta: Tensor | None = None) -> tuple[Tensor, ...]:
        return silu_lrpe_reference(x, theta, positions, form=form)

    return compare(kernel, reference, inputs)


backends.register("silu_lrpe", ("triton",), _self_test)
