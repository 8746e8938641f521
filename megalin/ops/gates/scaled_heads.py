"""Scaling of each head by its own factor: Mamba-2's values times their time steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample

MAX_WIDTH = 4096
"""Limit of the kernels, which hold full heads in registers."""


def scaled_heads(x: Tensor, factor: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Computes y = f x with one factor f per head and token.

    Args:
        x: [..., P].
        factor: f [...], in at least fp32.
        backend: implementation to run; compiled ones take x in fp32, bf16 and fp16, P up to 4096, and f in fp32.

    Returns:
        [..., P] in the dtype of x; products, and the sums over P of f's gradient, are computed in at least fp32.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: Mamba-2 section 7.
    """
    case = check_operands("scaled_heads", {"x": (x, "*P"), "factor": (factor, "*")}, "P")
    choice = backends.choose("scaled_heads", backend, x.device.type, _unsupported(x, factor), case=case)
    if choice == "reference":
        return scaled_heads_reference(x, factor)
    return _forward(x.contiguous(), factor.contiguous())


def scaled_heads_reference(x: Tensor, factor: Tensor) -> Tensor:
    """Reference of `scaled_heads` in plain PyTorch: tests the kernels and runs on CPUs."""
    return (factor[..., None] * x.to(compute_dtype(x))).to(x.dtype)


def _unsupported(x: Tensor, factor: Tensor) -> str:
    if x.dtype not in KERNEL_DTYPES or factor.dtype != torch.float32:
        return f"dtypes {x.dtype}, {factor.dtype}"
    if x.shape[-1] > MAX_WIDTH:
        return f"a width of {x.shape[-1]}, above {MAX_WIDTH}"
    return "an empty tensor" if x.numel() == 0 else ""


@custom_op("scaled_heads", lambda x, factor: torch.empty_like(x))
def _forward(x: Tensor, factor: Tensor) -> Tensor:
    from megalin._triton.gates import scaled_heads as kernels

    return kernels.forward(x.view(-1, x.shape[-1]), factor.view(-1)).view(x.shape)


@custom_op("scaled_heads_backward", lambda dy, x: x.new_empty(x.shape[:-1], dtype=torch.float32))
def _backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of the factor; that of x is the factor times dy."""
    from megalin._triton.gates import scaled_heads as kernels

    rows = (-1, x.shape[-1])
    return kernels.backward(dy.contiguous().view(rows), x.view(rows)).view(x.shape[:-1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, factor = ctx.saved_tensors
    # Outside the kernel, so that a compiled block adds it to x's other gradients without writing it.
    return (factor[..., None] * dy).to(x.dtype), _backward(dy, x)


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    inputs = [sample(3, ROWS, case["P"], device=device, dtype=case["x"]), sample(3, ROWS, device=device, seed=1)]
    return compare(_forward, scaled_heads_reference, inputs)


backends.register("scaled_heads", ("triton",), _self_test)
