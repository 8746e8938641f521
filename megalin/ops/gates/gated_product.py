"""The product of a gated linear unit, act(g) v, of the two halves of one projection."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import compare, sample

Activation = Literal["none", "silu"]


def gated_product(halves: Tensor, *, activation: Activation, backend: Backend = "auto") -> Tensor:
    """act(g) v.

    The halves stay together so that the backward writes their gradient as one tensor, which the projection's matrix
    product reads as it lies; nothing else is kept for it.

    Args:
        halves: [..., 2 F], g before v.
        activation: none (SGLU) or silu (SwiGLU).
        backend: which implementation runs; compiled ones take fp32, bf16 and fp16 and compute in fp32.

    Returns:
        [..., F] in the dtype of `halves`.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: an odd width, or no floating-point numbers.
    """
    check_operands("gated_product", {"halves": (halves, "*W")})
    if halves.shape[-1] % 2:
        raise OperandError(f"gated_product: halves has shape {tuple(halves.shape)}; its width must be even")
    choice = backends.choose("gated_product", backend, halves.device.type, _unsupported(halves))
    if choice == "reference":
        return gated_product_reference(halves, activation=activation)
    return _forward(halves.contiguous(), activation)


def gated_product_reference(halves: Tensor, *, activation: Activation) -> Tensor:
    """`gated_product` in plain PyTorch; the truth of the kernels and the CPU backend."""
    gate, value = halves.chunk(2, dim=-1)
    return (functional.silu(gate) if activation == "silu" else gate) * value


def _unsupported(halves: Tensor) -> str:
    if halves.dtype not in KERNEL_DTYPES:
        return f"dtype {halves.dtype}"
    return "an empty tensor" if halves.numel() == 0 else ""


@torch.library.custom_op("megalin::gated_product", mutates_args=())
def _forward(halves: Tensor, activation: str) -> Tensor:
    from megalin._triton.gates import gated_product as kernels

    product = kernels.forward(halves.view(-1, halves.shape[-1]), activation == "silu")
    return product.view(*halves.shape[:-1], -1)


@_forward.register_fake
def _(halves: Tensor, activation: str) -> Tensor:
    return halves.new_empty(*halves.shape[:-1], halves.shape[-1] // 2)


@torch.library.custom_op("megalin::gated_product_backward", mutates_args=())
def _backward(dproduct: Tensor, halves: Tensor, activation: str) -> Tensor:
    from megalin._triton.gates import gated_product as kernels

    dproduct = dproduct.contiguous().view(-1, dproduct.shape[-1])
    return kernels.backward(dproduct, halves.view(-1, halves.shape[-1]), activation == "silu").view(halves.shape)


@_backward.register_fake
def _(dproduct: Tensor, halves: Tensor, activation: str) -> Tensor:
    return halves.new_empty(halves.shape)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    halves, ctx.activation = inputs
    ctx.save_for_backward(halves)


def _differentiate(ctx: Any, dproduct: Tensor) -> tuple[Tensor, None]:
    (halves,) = ctx.saved_tensors
    return _backward(dproduct, halves, ctx.activation), None


_forward.register_autograd(_differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str) -> str:
    halves = sample(5, 400, device=device)
    activations: tuple[Activation, ...] = ("none", "silu")
    for activation in activations:

        def kernel(x: Tensor, activation: Activation = activation) -> Tensor:
            return _forward(x, activation)

        def reference(x: Tensor, activation: Activation = activation) -> Tensor:
            return gated_product_reference(x, activation=activation)

        if wrong := compare(kernel, reference, [halves]):
            return f"{activation}: {wrong}"
    return ""


backends.register("gated_product", ("triton",), _self_test)
