"""p = act(g) v of the halves [g | v] of one projection, act the identity or silu.

Bytes: the forward reads g and v and writes p; the backward reads g, v and dp and writes [dg | dv] side by side, as the
projection's gradient is read.
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


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(halves_ptr, product_ptr, rows, width, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, mask = _place(rows, width, ROWS, COLUMNS)
    source = halves_ptr + row * (2 * width) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        gate *= tl.sigmoid(gate)
    tl.store(product_ptr + row * width + column, gate * value, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dproduct_ptr, halves_ptr, dhalves_ptr, rows, width,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, column, mask = _place(rows, width, ROWS, COLUMNS)
    source = halves_ptr + row * (2 * width) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    dproduct = tl.load(dproduct_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    slope = 1.0
    if SILU:
        sigmoid = tl.sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        gate *= sigmoid
    target = dhalves_ptr + row * (2 * width) + column
    tl.store(target, dproduct * value * slope, mask=mask)
    tl.store(target + width, dproduct * gate, mask=mask)


def forward(halves: Tensor, silu: bool) -> Tensor:
    """halves [rows, 2 F] contiguous -> p [rows, F]."""
    rows, width = halves.shape[0], halves.shape[1] // 2
    product = halves.new_empty(rows, width)
    forward_kernel[_grid(rows, width)](halves, product, rows, width, silu, **TABLE)
    return product


def backward(dproduct: Tensor, halves: Tensor, silu: bool) -> Tensor:
    """dp [rows, F], halves [rows, 2 F], contiguous -> the gradient of the halves."""
    rows, width = dproduct.shape
    dhalves = halves.new_empty(halves.shape)
    backward_kernel[_grid(rows, width)](dproduct, halves, dhalves, rows, width, silu, **TABLE)
    return dhalves


def _grid(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, TABLE["ROWS"]), triton.cdiv(width, TABLE["COLUMNS"])


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    pointers = ("halves_ptr", "product_ptr", "dproduct_ptr", "dhalves_ptr")
    types = {**dict.fromkeys(pointers, "*bf16"), "rows": "i32", "width": "i32"}
    constants = {"SILU": True, "ROWS": TABLE["ROWS"], "COLUMNS": TABLE["COLUMNS"]}
    options = {"num_warps": TABLE["num_warps"]}
    return [(kernel, types, constants, options) for kernel in (forward_kernel, backward_kernel)]
