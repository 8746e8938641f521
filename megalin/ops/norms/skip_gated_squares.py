"""Fused skip connection, gate, weight and sum of squares of a scan's output, for a norm whose root is applied later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.projection_part import ProjectionPart, tensor_of
from megalin.ops.dispatch.self_test import ROWS, bound_of, compare, sample
from megalin.ops.norms.gated_squares import GatedSquares


def skip_gated_squares(
    x: Tensor,
    skip: Tensor,
    factor: Tensor,
    gate: Tensor | ProjectionPart,
    weight: Tensor,
    *,
    backend: Backend = "auto",
) -> GatedSquares:
    """Computes u w and sum_j u_j^2, u = (x + d s) silu(g): the ops of Rodimus and Mamba-2 from scan to output matmul.

    Args:
        x: [..., D].
        skip: s [..., D].
        factor: d [D].
        gate: g [..., D], before its silu; as a part of a projection, its gradient is that part of the projection's.
        weight: w [D], of the norm.
        backend: implementation to run; compiled ones take fp32, bf16 and fp16.

    Returns:
        GatedSquares: RMSNorm(u) w before division by the root mean square, computed in at least fp32, the product in
        the dtype of the gate. The backward keeps only x, s and g.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    own = tensor_of(gate)
    rows = {"x": (x, "*D"), "skip": (skip, "*D"), "gate": (own, "*D")}
    case = check_operands("skip_gated_squares", rows | {"factor": (factor, "D"), "weight": (weight, "D")}, "D")
    reason = _unsupported(x, skip, factor, own, weight)
    choice = backends.choose("skip_gated_squares", backend, x.device.type, reason, case=case)
    if choice == "reference":
        return skip_gated_squares_reference(x, skip, factor, own, weight)
    gates, part = _rows(own)[:, None], 0
    if isinstance(gate, ProjectionPart):
        gates, part = gate.whole.flatten(0, -3), gate.part
    product, squares = _forward(_rows(x), _rows(skip), factor.contiguous(), gates, weight.contiguous(), part)
    return GatedSquares(product.view(x.shape), squares.view(x.shape[:-1]))


def skip_gated_squares_reference(x: Tensor, skip: Tensor, factor: Tensor, gate: Tensor, weight: Tensor) -> GatedSquares:
    """Reference of `skip_gated_squares` in plain PyTorch: tests the kernels and runs on CPUs."""
    wide = compute_dtype(x)
    u = (x.to(wide) + factor.to(wide) * skip.to(wide)) * functional.silu(gate.to(wide))
    return GatedSquares((u * weight.to(wide)).to(gate.dtype), u.square().sum(-1))


def _unsupported(*tensors: Tensor) -> str:
    wrong = [str(tensor.dtype) for tensor in tensors if tensor.dtype not in KERNEL_DTYPES]
    if wrong:
        return f"dtype {wrong[0]}"
    return "an empty tensor" if tensors[0].numel() == 0 else ""


def _rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D] with contiguous rows; a view where the strides allow."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _fake_forward(x: Tensor, skip: Tensor, factor: Tensor, gates: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return gates.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


@custom_op("skip_gated_squares", _fake_forward)
def _forward(
    x: Tensor, skip: Tensor, factor: Tensor, gates: Tensor, weight: Tensor, part: int
) -> tuple[Tensor, Tensor]:
    """The op of rows; gates [rows, P, D], one of whose parts is the gate."""
    from megalin._triton.norms import skip_gated_squares as kernels

    return kernels.forward(x, skip, gates[:, part], factor, weight)


def _fake_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, x, _, factor, gates, weight, _ = inputs
    return x.new_empty(x.shape), gates.new_empty(gates.shape), torch.empty_like(factor), torch.empty_like(weight)


@custom_op("skip_gated_squares_backward", _fake_backward)
def _backward(
    dproduct: Tensor,
    dsquares: Tensor,
    x: Tensor,
    skip: Tensor,
    factor: Tensor,
    gates: Tensor,
    weight: Tensor,
    part: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gates, factor and weight; that of skip is factor times the first.

    That of gates [rows, P, D] is defined in the gate's part alone (`ProjectionPart`).
    """
    from megalin._triton.norms import skip_gated_squares as kernels

    dgates = gates.new_empty(gates.shape)
    dx, dfactor, dweight = kernels.backward(
        _rows(dproduct), dsquares.contiguous(), x, skip, gates[:, part], factor, weight, dgates[:, part]
    )
    return dx, dgates, dfactor, dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.part = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dproduct: Tensor, dsquares: Tensor) -> tuple[Tensor | None, ...]:
    x, skip, factor, gates, weight = ctx.saved_tensors
    dx, dgates, dfactor, dweight = _backward(dproduct, dsquares, x, skip, factor, gates, weight, ctx.part)
    # Outside the kernel, so that a compiled block adds it to skip's other gradients without writing it.
    return dx, (factor * dx).to(skip.dtype), dfactor, dgates, dweight, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    sizes = dict.fromkeys(("x", "skip", "gate"), (ROWS, case["D"])) | dict.fromkeys(("factor", "weight"), (case["D"],))
    inputs = [
        sample(*size, device=device, seed=seed, dtype=case[name]) for seed, (name, size) in enumerate(sizes.items())
    ]

    def function(x: Tensor, skip: Tensor, gate: Tensor, factor: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(x, skip, factor, gate[:, None], weight, 0)

    def reference(x: Tensor, skip: Tensor, gate: Tensor, factor: Tensor, weight: Tensor) -> GatedSquares:
        return skip_gated_squares_reference(x, skip, factor, gate, weight)

    return compare(function, reference, inputs, bound=max(bound_of(x.dtype) for x in inputs))


backends.register("skip_gated_squares", ("triton",), _self_test)
