"""Fused gate, weight and sum of squares in one pass, for a norm whose root is applied after a matmul."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.fusion import left_to_inductor
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample


class GatedSquares(NamedTuple):
    """Inputs of a norm whose width is sharded, from this rank's shard of it."""

    product: Tensor
    """[..., D] in the dtype of the gate, or else of x."""
    squares: Tensor
    """[...] sums over D, in at least fp32."""


def gated_squares(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    gate_first: bool = False,
    backend: Backend = "auto",
) -> GatedSquares:
    """Computes x w g and sum_j x_j^2; with the gate first u w and sum_j u_j^2, u = x silu(g).

    Args:
        x: [..., D], any float dtype; sums are accumulated in at least fp32.
        gate: g [..., D], a plain factor, or with `gate_first` after a silu; None: one.
        weight: w [D]; None: one.
        gate_first: True for the norm of the gated x (Rodimus, Mamba-2), False for that of x (TransNormerLLM, TNL).
        backend: implementation to run; in compiled blocks "auto" leaves the reference to inductor.
            The compiled one takes fp32, bf16 and fp16.

    Returns:
        GatedSquares: RMSNorm(x) w g, or RMSNorm(u) w, before division by the root mean square over all shards.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    case = check_operands("gated_squares", {"x": (x, "*D"), "gate": (gate, "*D"), "weight": (weight, "D")}, "D")
    case = (*case, ("gate_first", gate_first))
    choice = backends.choose("gated_squares", backend, x.device.type, _unsupported(x, gate, weight), case=case)
    if choice == "reference" or left_to_inductor("gated_squares", backend):
        return gated_squares_reference(x, gate, weight, gate_first=gate_first)
    return GatedSquares(*_forward(x.contiguous(), contiguous(gate), contiguous(weight), gate_first))


def gated_squares_reference(
    x: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, *, gate_first: bool = False
) -> GatedSquares:
    """Reference of `gated_squares` in plain PyTorch: tests the kernels and runs on CPUs."""
    if gate is not None and gate_first:
        x, gate = (x * functional.silu(gate)).to(gate.dtype), None
    squares = x.to(compute_dtype(x)).square().sum(-1)
    product = x if weight is None else x * weight
    return GatedSquares(product if gate is None else product * gate, squares)


def _unsupported(x: Tensor, gate: Tensor | None, weight: Tensor | None) -> str:
    tensors = [tensor for tensor in (x, gate, weight) if tensor is not None]
    wrong = [str(tensor.dtype) for tensor in tensors if tensor.dtype not in KERNEL_DTYPES]
    if wrong:
        return f"dtype {wrong[0]}"
    return "an empty tensor" if x.numel() == 0 else ""


def _fake_forward(x: Tensor, gate: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x if gate is None else gate), x.new_empty(x.shape[:-1], dtype=torch.float32)


@custom_op("gated_squares", _fake_forward)
def _forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, gate_first: bool) -> tuple[Tensor, Tensor]:
    from megalin._triton.norms import gated_squares as kernels

    width = x.shape[-1]
    rows = None if gate is None else gate.view(-1, width)
    product, squares = kernels.forward(x.view(-1, width), rows, weight, gate_first)
    return product.view(x.shape), squares.view(x.shape[:-1])


def _fake_backward(_dproduct: Tensor, _dsquares: Tensor, *operands: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in operands[:3] if tensor is not None]


@custom_op("gated_squares_backward", _fake_backward)
def _backward(
    dproduct: Tensor, dsquares: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, gate_first: bool
) -> list[Tensor]:
    """Computes dx, then dgate and dweight for the given operands."""
    from megalin._triton.norms import gated_squares as kernels

    width = x.shape[-1]
    rows = None if gate is None else gate.view(-1, width)
    dproduct, dsquares = dproduct.contiguous().view(-1, width), dsquares.contiguous().view(-1)
    dx, dgate, dweight = kernels.backward(dproduct, dsquares, x.view(-1, width), rows, weight, gate_first)
    found = [dx.view(x.shape)]
    if dgate is not None:
        found.append(dgate.view(x.shape))
    return found if dweight is None else [*found, dweight]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, ctx.gate_first = inputs
    ctx.save_for_backward(x, gate, weight)


def _differentiate(ctx: Any, dproduct: Tensor, dsquares: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, weight = ctx.saved_tensors
    found = iter(_backward(dproduct, dsquares, x, gate, weight, ctx.gate_first))
    dx, dgate, dweight = (None if tensor is None else next(found) for tensor in (x, gate, weight))
    return dx, dgate, dweight, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    sizes = {"x": (ROWS, case["D"]), "gate": (ROWS, case["D"]), "weight": (case["D"],)}
    given = [name for name in sizes if case[name] is not None]
    first = case["gate_first"]

    def kernel(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(given, tensors, strict=True))
        return _forward(named["x"], named.get("gate"), named.get("weight"), first)

    def reference(*tensors: Tensor) -> GatedSquares:
        return gated_squares_reference(**dict(zip(given, tensors, strict=True)), gate_first=first)

    inputs = [sample(*sizes[name], device=device, seed=seed, dtype=case[name]) for seed, name in enumerate(given)]
    return compare(kernel, reference, inputs)


backends.register("gated_squares", ("triton",), _self_test)
