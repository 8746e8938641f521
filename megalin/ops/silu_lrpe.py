"""SiLU and learnable relative positions of queries and keys together: what linear attention puts before its scan."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops import backend as backends
from megalin.ops.backend import Backend, Compiled
from megalin.ops.positions import lrpe_cosine, lrpe_rotation
from megalin.ops.self_test import compare, sample
from megalin.ops.srmsnorm import KERNEL_DTYPES

LRPEForm = Literal["cosine", "rotation"]


def silu_lrpe(
    q: Tensor, k: Tensor, theta: Tensor, positions: Tensor, *, form: LRPEForm, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """LRPE(silu(q)), LRPE(silu(k)) in the `cosine` or the `rotation` form of `ops.positions`.

    Args:
        q, k: [B, T, H, K].
        theta: [H, K] (cosine) or [H, K/2] (rotation), radians a token, fp32.
        positions: [T] or [B, T], integers.
        backend: which implementation runs; compiled ones take fp32, bf16 and fp16.

    Returns:
        Two of [B, T, H, 2K] (cosine) or [B, T, H, K] (rotation) in the dtype of `q`; the gradient of theta is summed
        in fp32, always in the same order.

    Raises:
        KernelError: an explicit backend that cannot run.
    """
    choice = backends.choose("silu_lrpe", backend, q.device.type, _unsupported(q, k, theta))
    if choice == "reference":
        return silu_lrpe_reference(q, k, theta, positions, form=form)
    return _forward(q, k, theta, positions, form)


def silu_lrpe_reference(
    q: Tensor, k: Tensor, theta: Tensor, positions: Tensor, *, form: LRPEForm
) -> tuple[Tensor, Tensor]:
    """`silu_lrpe` in plain PyTorch; the truth of the kernels and the CPU backend."""
    encode = lrpe_cosine if form == "cosine" else lrpe_rotation
    return encode(functional.silu(q), theta, positions), encode(functional.silu(k), theta, positions)


def _unsupported(q: Tensor, k: Tensor, theta: Tensor) -> str:
    if q.dtype not in KERNEL_DTYPES or k.dtype != q.dtype or theta.dtype != torch.float32:
        return f"dtypes {q.dtype}, {k.dtype} and {theta.dtype}"
    return "an empty tensor" if q.numel() == 0 else ""


def _rows(x: Tensor) -> Tensor:
    """[B, T, H, K] as [B T, H, K] with the elements of a row side by side: a view where the strides allow."""
    batch, length, heads, key = x.shape
    whole = x.stride(3) == 1 and x.stride(2) == key and (batch == 1 or x.stride(0) == length * x.stride(1))
    return x.as_strided((batch * length, heads, key), (x.stride(1), key, 1)) if whole else x.flatten(0, 1).contiguous()


@torch.library.custom_op("megalin::silu_lrpe", mutates_args=())
def _forward(q: Tensor, k: Tensor, theta: Tensor, positions: Tensor, form: str) -> tuple[Tensor, Tensor]:
    from megalin._triton import silu_lrpe as kernels

    codes = kernels.forward(
        _rows(q), _rows(k), theta.contiguous(), positions.flatten().contiguous(), rotation=form == "rotation"
    )
    return codes[0].unflatten(0, q.shape[:2]), codes[1].unflatten(0, q.shape[:2])


@_forward.register_fake
def _(q: Tensor, k: Tensor, theta: Tensor, positions: Tensor, form: str) -> tuple[Tensor, Tensor]:
    shape = [*q.shape[:3], q.shape[3] * (2 if form == "cosine" else 1)]
    return q.new_empty(shape), q.new_empty(shape)


@torch.library.custom_op("megalin::silu_lrpe_backward", mutates_args=())
def _backward(
    dq_code: Tensor, dk_code: Tensor, q: Tensor, k: Tensor, theta: Tensor, positions: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton import silu_lrpe as kernels

    dq, dk, dtheta = kernels.backward(
        dq_code.contiguous().flatten(0, 1),
        dk_code.contiguous().flatten(0, 1),
        _rows(q),
        _rows(k),
        theta.contiguous(),
        positions.flatten().contiguous(),
        rotation=form == "rotation",
    )
    return dq.view(q.shape), dk.view(k.shape), dtheta


@_backward.register_fake
def _(
    dq_code: Tensor, dk_code: Tensor, q: Tensor, k: Tensor, theta: Tensor, positions: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), theta.new_empty(theta.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.form = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(
    ctx: Any, dq_code: Tensor | None, dk_code: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, theta, positions = ctx.saved_tensors
    assert dq_code is not None
    assert dk_code is not None
    return *_backward(dq_code, dk_code, q, k, theta, positions, ctx.form), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str) -> str:
    q, k = (sample(2, 5, 3, 8, device=device, seed=seed) for seed in range(2))
    positions = torch.tensor([0, 1, 7, 500, 4099], device=device)
    for form, width in (("cosine", 8), ("rotation", 4)):
        theta = sample(3, width, device=device, seed=2).abs()

        def kernel(q: Tensor, k: Tensor, theta: Tensor, form: str = form) -> tuple[Tensor, Tensor]:
            return _forward(q, k, theta, positions, form)

        def reference(q: Tensor, k: Tensor, theta: Tensor, form: Any = form) -> tuple[Tensor, Tensor]:
            return silu_lrpe_reference(q, k, theta, positions, form=form)

        if wrong := compare(kernel, reference, [q, k, theta]):
            return f"{form}: {wrong}"
    return ""


backends.register("silu_lrpe", ("triton",), _self_test)
