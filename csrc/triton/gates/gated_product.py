"""Computes p = act(g) v from one projection [g | v], act the identity or silu.

Bytes: forward reads g and v and writes p; backward reads g, v and dp and writes [dg | dv], the projection's gradient.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl

TABLE = {"ROWS": 2, "COLUMNS": 1024, "num_warps": 4}


@triton.jit
def _place(rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return row[:, None], column[None, :], (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def product_of(gate, value, SILU: tl.constexpr):
    """act(g) v in fp32."""
    if SILU:
        gate *= tl.sigmoid(gate)
    return gate * value


@triton.jit
def gradients_of(dproduct, gate, value, SILU: tl.constexpr):
    """(dg, dv) in fp32."""
    slope = 1.0
    if SILU:
        sigmoid = tl.sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        gate *= sigmoid
    return dproduct * value * slope, dproduct * gate


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    gate_value_ptr, product_ptr, rows, width, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, mask = _place(rows, width, ROWS, COLUMNS)
    source = gate_value_ptr + row * (2 * width) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(product_ptr + row * width + column, product_of(gate, value, SILU), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dproduct_ptr, gate_value_ptr, dgate_value_ptr, rows, width,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, column, mask = _place(rows, width, ROWS, COLUMNS)
    source = gate_value_ptr + row * (2 * width) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    dproduct = tl.load(dproduct_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    dgate, dvalue = gradients_of(dproduct, gate, value, SILU)
    target = dgate_value_ptr + row * (2 * width) + column
    tl.store(target, dgate, mask=mask)
    tl.store(target + width, dvalue, mask=mask)


def forward(gate_value: Tensor, silu: bool) -> Tensor:
    """gate_value [rows, 2 F] contiguous -> p [rows, F]."""
    rows, width = gate_value.shape[0], gate_value.shape[1] // 2
    product = gate_value.new_empty(rows, width)
    forward_kernel[_grid(rows, width)](gate_value, product, rows, width, silu, **TABLE)
    return product


def backward(dproduct: Tensor, gate_value: Tensor, silu: bool) -> Tensor:
    """dp [rows, F], gate_value [rows, 2 F], contiguous -> the gradient of gate_value."""
    rows, width = dproduct.shape
    dgate_value = gate_value.new_empty(gate_value.shape)
    backward_kernel[_grid(rows, width)](dproduct, gate_value, dgate_value, rows, width, silu, **TABLE)
    return dgate_value


def _grid(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, TABLE["ROWS"]), triton.cdiv(width, TABLE["COLUMNS"])
