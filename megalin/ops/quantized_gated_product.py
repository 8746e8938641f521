"""Gated product together with the FP8 rows that the next matmul reads, so that no separate cast reads it again.

    p = act(g) v of one projection [g | v]        (c, s) = the rows of p as e4m3 codes and scales

The backward gives the rows of [dg | dv] likewise. Both equal `quantize_rows` after `gated_product` and its backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.choices import Activation
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES
from megalin.ops.dispatch.operands import Case, check_operands, static
from megalin.ops.dispatch.self_test import BOUND, ROWS, sample
from megalin.ops.gates.gated_product import gated_product_reference
from megalin.ops.scaled_linear import CODE_DTYPE, ScaledRows, quantize_rows_reference, row_magnitudes

OP = "quantized_gated_product"
LARGEST_WIDTH = 16384
"""Largest F of the kernels, which keep a row in registers."""


class QuantizedTensor(NamedTuple):
    """A matrix in its own dtype and as FP8 rows."""

    tensor: Tensor
    """[R, K]."""
    rows: ScaledRows
    """Its rows, quantised after rounding to the dtype of `tensor`."""


def fuses_gated_product(x: Tensor, width: int) -> bool:
    """True where the kernels of this module run for `width` columns of the product in the dtype and on the device of x;
    otherwise `gated_product` and a separate cast compute the same."""
    return backends.choose(OP, "auto", x.device.type, _unsupported(x, width), case=_case(x, width)) != "reference"


def quantized_gated_product(
    gate_value: Tensor, *, activation: Activation, backend: Backend = "auto"
) -> QuantizedTensor:
    """Computes act(g) v [R, F] and its FP8 rows. No gradient: see `quantized_gated_product_backward`.

    Args:
        gate_value: [R, 2 F], g before v.
        activation: none (SGLU) or silu (SwiGLU).
        backend: implementation to run; the kernel takes fp32, bf16 and fp16, F up to 16384, and computes in fp32.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: an odd width, or a dtype that is not floating point.
    """
    check_operands(OP, {"gate_value": (gate_value, "RW")})
    if gate_value.shape[1] % 2:
        raise OperandError(f"{OP}: gate_value has shape {tuple(gate_value.shape)}; its width must be even")
    if _choose(gate_value, backend) == "reference":
        return _with_rows(gated_product_reference(gate_value, activation=activation))
    product, codes, scales = _forward(gate_value.contiguous(), activation)
    return QuantizedTensor(product, ScaledRows(codes, scales))


def quantized_gated_product_backward(
    dproduct: Tensor, gate_value: Tensor, *, activation: Activation, backend: Backend = "auto"
) -> QuantizedTensor:
    """The gradient [R, 2 F] of `gate_value` and its FP8 rows, from the gradient dproduct [R, F] of the product. Other
    arguments and errors as for `quantized_gated_product`; OperandError also where the widths do not match."""
    check_operands(OP, {"dproduct": (dproduct, "RF"), "gate_value": (gate_value, "RW")})
    if gate_value.shape[1] != 2 * dproduct.shape[1]:
        raise OperandError(
            f"{OP}: gate_value has shape {tuple(gate_value.shape)}; its width must be twice that of dproduct, "
            f"{tuple(dproduct.shape)}"
        )
    if _choose(gate_value, backend) == "reference":
        return _with_rows(_backward_reference(dproduct, gate_value, activation))
    dgate_value, codes, scales = _backward(dproduct.contiguous(), gate_value.contiguous(), activation)
    return QuantizedTensor(dgate_value, ScaledRows(codes, scales))


def _choose(gate_value: Tensor, backend: Backend) -> str:
    width = gate_value.shape[1] // 2
    reason = _unsupported(gate_value, width)
    return backends.choose(OP, backend, gate_value.device.type, reason, case=_case(gate_value, width))


def _backward_reference(dproduct: Tensor, gate_value: Tensor, activation: Activation) -> Tensor:
    gate, value = gate_value.chunk(2, dim=-1)
    if activation == "none":
        return torch.cat([dproduct * value, dproduct * gate], dim=-1)
    dgate = torch.ops.aten.silu_backward(dproduct * value, gate)
    return torch.cat([dgate, dproduct * functional.silu(gate)], dim=-1)


def _with_rows(tensor: Tensor) -> QuantizedTensor:
    return QuantizedTensor(tensor, quantize_rows_reference(tensor, row_magnitudes(tensor)))


def _case(x: Tensor, width: int) -> Case:
    return (("F", static(width)), ("x", x.dtype))


def _unsupported(x: Tensor, width: int) -> str:
    if x.dtype not in KERNEL_DTYPES:
        return f"dtype {x.dtype}"
    if width > LARGEST_WIDTH:
        return f"{width} columns of the product, more than {LARGEST_WIDTH}"
    return "an empty tensor" if x.numel() == 0 else ""


def _empty(x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    codes = x.new_empty(rows, width, dtype=CODE_DTYPE)
    return x.new_empty(rows, width), codes, x.new_empty(rows, dtype=torch.float32)


@custom_op(OP, lambda x, _: _empty(x, x.shape[1] // 2))
def _forward(gate_value: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton import quantized_gated_product as kernels

    return kernels.forward(gate_value, activation == "silu")


@custom_op(f"{OP}_backward", lambda _, x, __: _empty(x, x.shape[1]))
def _backward(dproduct: Tensor, gate_value: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton import quantized_gated_product as kernels

    return kernels.backward(dproduct, gate_value, activation == "silu")


@torch.no_grad()
def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Values against the reference in fp64, and the bits of codes and scales against its cast."""
    width = case["F"]
    x, dy = (sample(ROWS, size, device=device, seed=size, dtype=case["x"]) for size in (2 * width, width))
    x[1] = 0.0
    activations: tuple[Activation, ...] = ("none", "silu")
    for activation in activations:
        exact, dexact = x.double(), dy.double()
        pairs = {
            "product": (_forward(x, activation), gated_product_reference(exact, activation=activation)),
            "gradient": (_backward(dy, x, activation), _backward_reference(dexact, exact, activation)),
        }
        for name, ((tensor, codes, scales), truth) in pairs.items():
            if not (error := ((tensor - truth).norm() / truth.norm()).item()) <= BOUND:
                return f"self-test: the {name} with activation {activation} is off by {error:.1e} (bound {BOUND:.0e})"
            rows = quantize_rows_reference(tensor, row_magnitudes(tensor))
            if wrong := int((codes.view(torch.uint8) != rows.codes.view(torch.uint8)).sum()):
                return f"self-test: {wrong} of {codes.numel()} codes of the {name} differ from the reference"
            if not torch.equal(scales, rows.scales):
                return f"self-test: scales of the {name} differ from the reference"
    return ""


backends.register(OP, ("triton",), _self_test)
