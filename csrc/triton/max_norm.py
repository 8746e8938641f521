"""MaxNorm, y = f c x / (max |x| + eps), f one factor a row and c = cos(p theta) of Cosine RelPE, both or neither.

Bytes: forward reads x and writes y; backward reads x, dy and writes dx. Three numbers a row, a table of two numbers a
column beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def cosine(position, turns, rest):
    """cos(2 pi p (turns + rest)), the angle reduced in turns: exact to 4e-7 for p < 2^24."""
    angle = position * turns
    error = tl.fma(position, turns, -angle) + position * rest
    fraction = angle - tl.floor(angle + 0.5) + error
    z = fraction * fraction
    y = 6.528658390045166 * z - 25.967599868774414
    y = y * z + 60.16762924194336
    y = y * z - 85.45014190673828
    y = y * z + 64.93911743164062
    y = y * z - 19.73920440673828
    return y * z + 1.0


@triton.jit
def load_rows(x_ptr, row, column, rows, width):
    """[R, W] in fp32, zero outside of the matrix."""
    mask = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(x_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(y_ptr, y, row, column, rows, width):
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(y_ptr + row[:, None] * width + column[None, :], y, mask=mask)


@triton.jit
def encode(x, factor_ptr, position_ptr, table_ptr, row, column, rows, width, ENCODED: tl.constexpr):
    """f c x [R, W], exact zeros in rows of f = 0, where x may be anything."""
    if ENCODED:
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
        position = tl.load(position_ptr + row, mask=row < rows, other=0).to(tl.float32)[:, None]
        turns = tl.load(table_ptr + column, mask=column < width, other=0.0)[None, :]
        rest = tl.load(table_ptr + width + column, mask=column < width, other=0.0)[None, :]
        return tl.where(factor == 0.0, 0.0, x * (factor * cosine(position, turns, rest)))
    return x


@triton.jit
def move(dy, unit, inverse, pull, index, column):
    """dx of dy = d / d unit: the largest element carries the whole row's pull."""
    sign = tl.where(unit > 0.0, 1.0, 0.0) - tl.where(unit < 0.0, 1.0, 0.0)
    return inverse * tl.where(column[None, :] == index, dy - sign * pull, dy)


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr,
    factor_ptr,
    position_ptr,
    table_ptr,
    y_ptr,
    peak_ptr,
    index_ptr,
    rows,
    width,
    eps,
    ENCODED: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Rows of up to BLOCK_WIDTH in registers; longer ones (LOOP) are read again from the cache."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    x = load_rows(x_ptr, row, column, rows, width)
    highest, place = tl.abs(x), tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.int32) + column[None, :]
    if LOOP:
        for start in range(BLOCK_WIDTH, width, BLOCK_WIDTH):
            more = tl.abs(load_rows(x_ptr, row, start + column, rows, width))
            place = tl.where(more > highest, start + column[None, :], place)
            highest = tl.maximum(highest, more)
    largest = tl.max(highest, axis=1)
    # The first of equals, as torch.max has it; an integer minimum is cheaper than an indexed maximum.
    index = tl.min(tl.where(highest == largest[:, None], place, 2147483647), axis=1)
    peak = largest + eps
    tl.store(peak_ptr + row, peak, mask=row < rows)
    tl.store(index_ptr + row, index, mask=row < rows)
    y = encode(x / peak[:, None], factor_ptr, position_ptr, table_ptr, row, column, rows, width, ENCODED)
    store_rows(y_ptr, y, row, column, rows, width)
    if LOOP:
        for start in range(BLOCK_WIDTH, width, BLOCK_WIDTH):
            here = start + column
            y = load_rows(x_ptr, row, here, rows, width) / peak[:, None]
            y = encode(y, factor_ptr, position_ptr, table_ptr, row, here, rows, width, ENCODED)
            store_rows(y_ptr, y, row, here, rows, width)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr,
    x_ptr,
    factor_ptr,
    position_ptr,
    table_ptr,
    peak_ptr,
    index_ptr,
    dx_ptr,
    rows,
    width,
    ENCODED: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    inverse = 1.0 / tl.load(peak_ptr + row, mask=row < rows, other=1.0)[:, None]
    index = tl.load(index_ptr + row, mask=row < rows, other=0)[:, None]
    unit = load_rows(x_ptr, row, column, rows, width) * inverse
    dy = load_rows(dy_ptr, row, column, rows, width)
    dy = encode(dy, factor_ptr, position_ptr, table_ptr, row, column, rows, width, ENCODED)
    products = dy * unit
    if LOOP:
        for start in range(BLOCK_WIDTH, width, BLOCK_WIDTH):
            here = start + column
            more = load_rows(dy_ptr, row, here, rows, width)
            more = encode(more, factor_ptr, position_ptr, table_ptr, row, here, rows, width, ENCODED)
            products += more * load_rows(x_ptr, row, here, rows, width) * inverse
    pull = tl.sum(products, axis=1)[:, None]
    store_rows(dx_ptr, move(dy, unit, inverse, pull, index, column), row, column, rows, width)
    if LOOP:
        for start in range(BLOCK_WIDTH, width, BLOCK_WIDTH):
            here = start + column
            unit = load_rows(x_ptr, row, here, rows, width) * inverse
            dy = load_rows(dy_ptr, row, here, rows, width)
            dy = encode(dy, factor_ptr, position_ptr, table_ptr, row, here, rows, width, ENCODED)
            store_rows(dx_ptr, move(dy, unit, inverse, pull, index, here), row, here, rows, width)


def _launch(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants: 16 elements a thread, rows of up to 8192 whole."""
    block_width = triton.next_power_of_2(width) if width <= 8192 else 4096
    block_rows = max(1, 2048 // block_width)
    return (triton.cdiv(rows, block_rows),), {
        "LOOP": width > block_width,
        "BLOCK_ROWS": block_rows,
        "BLOCK_WIDTH": block_width,
        "num_warps": max(4, block_width // 512),
    }


Encoding = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Factors [rows] fp32, positions [rows] int32, and the table [2, width] fp32 of frequencies in turns a position: the
nearest number and what it lacks. Without: three times None."""


def forward(x: Tensor, encoding: Encoding, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, width] contiguous -> y like x; max |x| + eps [rows] fp32 and where it lies [rows] int32."""
    rows, width = x.shape
    y, peak = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    index = x.new_empty(rows, dtype=torch.int32)
    grid, constants = _launch(rows, width)
    forward_kernel[grid](x, *encoding, y, peak, index, rows, width, eps, ENCODED=encoding[0] is not None, **constants)
    return y, peak, index


def backward(dy: Tensor, x: Tensor, encoding: Encoding, peak: Tensor, index: Tensor) -> Tensor:
    """dy, x [rows, width] contiguous, the rest as the forward took and gave it -> dx like x."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    grid, constants = _launch(rows, width)
    backward_kernel[grid](dy, x, *encoding, peak, index, dx, rows, width, ENCODED=encoding[0] is not None, **constants)
    return dx


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, int], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    cases = []
    for width in (64, 1024, 12288):
        constants = _launch(4096, width)[1] | {"ENCODED": True}
        options = {"num_warps": constants.pop("num_warps")}
        rows = {"factor_ptr": "*fp32", "position_ptr": "*i32", "table_ptr": "*fp32"}
        common = {**rows, "peak_ptr": "*fp32", "index_ptr": "*i32", "x_ptr": "*bf16", "rows": "i32", "width": "i32"}
        cases.append((forward_kernel, {**common, "y_ptr": "*bf16", "eps": "fp32"}, constants, options))
        cases.append((backward_kernel, {**common, "dy_ptr": "*bf16", "dx_ptr": "*bf16"}, constants, options))
    return cases
