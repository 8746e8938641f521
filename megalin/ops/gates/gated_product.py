"""Activation and product of a gated linear unit, act(g) v, from one projection [g | v]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.choices import Activation
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample


def gated_product(gate_value: Tensor, *, activation: Activation, backend: Backend = "auto") -> Tensor:
    """Computes act(g) v.

    Takes g and v as one tensor, the only one kept, so that the backward writes their gradient as one tensor for the
    projection's matmul, without a copy.

    Args:
        gate_value: [..., 2 F], g before v.
        activation: none (SGLU) or silu (SwiGLU).
        backend: implementation to run; compiled ones take fp32, bf16 and fp16 and compute in fp32.

    Returns:
        [..., F] in the dtype of `gate_value`.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: an odd width, or a dtype that is not floating point.
    """
    case = check_operands("gated_product", {"gate_value": (gate_value, "*W")}, "W")
    case = (*case, ("activation", activation))
    if gate_value.shape[-1] % 2:
        raise OperandError(f"gated_product: gate_value has shape {tuple(gate_value.shape)}; its width must be even")
    choice = backends.choose("gated_product", backend, gate_value.device.type, _unsupported(gate_value), case=case)
    if choice == "reference":
        return gated_product_reference(gate_value, activation=activation)
    return _forward(gate_value.contiguous(), activation)


def gated_product_reference(gate_value: Tensor, *, activation: Activation) -> Tensor:
    """Reference of `gated_product` in plain PyTorch: tests the kernels and runs on CPUs."""
    gate, value = gate_value.chunk(2, dim=-1)
    return (functional.silu(gate) if activation == "silu" else gate) * value


def _unsupported(gate_value: Tensor) -> str:
    if gate_value.dtype not in KERNEL_DTYPES:
        return f"dtype {gate_value.dtype}"
    return "an empty tensor" if gate_value.numel() == 0 else ""


@custom_op("gated_product", lambda x, _: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
def _forward(gate_value: Tensor, activation: str) -> Tensor:
    from megalin._triton.gates import gated_product as kernels

    product = kernels.forward(gate_value.view(-1, gate_value.shape[-1]), activation == "silu")
    return product.view(*gate_value.shape[:-1], -1)


@custom_op("gated_product_backward", lambda dproduct, x, _: x.new_empty(x.shape))
def _backward(dproduct: Tensor, gate_value: Tensor, activation: str) -> Tensor:
    from megalin._triton.gates import gated_product as kernels

    dproduct = dproduct.contiguous().view(-1, dproduct.shape[-1])
    return kernels.backward(dproduct, gate_value.view(-1, gate_value.shape[-1]), activation == "silu").view(
        gate_value.shape
    )


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    gate_value, ctx.activation = inputs
    ctx.save_for_backward(gate_value)


def _differentiate(ctx: Any, dproduct: Tensor) -> tuple[Tensor, None]:
    (gate_value,) = ctx.saved_tensors
    return _backward(dproduct, gate_value, ctx.activation), None


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    activation = case["activation"]
    return compare(
        lambda x: _forward(x, activation),
        lambda x: gated_product_reference(x, activation=activation),
        [sample(ROWS, case["W"], device=device, dtype=case["gate_value"])],
    )


backends.register("gated_product", ("triton",), _self_test)
