"""Computes p = u w and the row sums of u^2 with u = (x + d s) silu(g): a skip connection d s before gate and norm.

Bytes: forward reads x, s and g and writes p; backward reads x, s, g, dp and writes dx and dg; ds = d dx is left to its
consumer. Each backward program iterates over a segment of rows for a tile of columns and accumulates partial dw and dd;
the partial sums are added afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

SEGMENTS = 1056
"""Programs of the backward, eight per multiprocessor of an H200."""


@triton.jit
def _load(ptr, row, stride, column, mask):
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_columns(ptr, column, width):
    return tl.load(ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, skip_ptr, gate_ptr, factor_ptr, weight_ptr, product_ptr, squares_ptr,
    x_row, skip_row, gate_row, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        x, skip = _load(x_ptr, row, x_row, column, mask), _load(skip_ptr, row, skip_row, column, mask)
        gate = _load(gate_ptr, row, gate_row, column, mask)
        u = (x + _load_columns(factor_ptr, column, width) * skip) * (gate * tl.sigmoid(gate))
        squares += u * u
        product = u * _load_columns(weight_ptr, column, width)
        tl.store(product_ptr + row[:, None] * width + column[None, :], product, mask=mask)
    tl.store(squares_ptr + row, tl.sum(squares, axis=1), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "segment_rows"])
def backward_kernel(
    dproduct_ptr, dsquares_ptr, x_ptr, skip_ptr, gate_ptr, factor_ptr, weight_ptr,
    dx_ptr, dgate_ptr, partial_ptr,  # partial [2, segments, D] fp32: dfactor, dweight
    dproduct_row, x_row, skip_row, gate_row, dgate_row, rows, width, segment_rows,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * segment_rows
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    end = tl.minimum(first + segment_rows, rows)
    factor, weight = _load_columns(factor_ptr, column, width), _load_columns(weight_ptr, column, width)
    dfactor = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    for start in range(0, segment_rows, BLOCK_ROWS):
        row = first + start + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        x, skip = _load(x_ptr, row, x_row, column, mask), _load(skip_ptr, row, skip_row, column, mask)
        gate = _load(gate_ptr, row, gate_row, column, mask)
        dproduct = _load(dproduct_ptr, row, dproduct_row, column, mask)
        dsquares = tl.load(dsquares_ptr + row, mask=row < end, other=0.0)[:, None]
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        summed = x + factor * skip
        u = summed * silu
        du = dproduct * weight + 2.0 * u * dsquares
        dx = du * silu
        tl.store(dx_ptr + row[:, None] * width + column[None, :], dx, mask=mask)
        dgate = du * summed * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(dgate_ptr + row[:, None] * dgate_row + column[None, :], dgate, mask=mask)
        dfactor += dx * skip
        dweight += dproduct * u
    at = tl.program_id(0).to(tl.int64) * width + column
    tl.store(partial_ptr + at, tl.sum(dfactor, axis=0), mask=column < width)
    at += tl.num_programs(0).to(tl.int64) * width
    tl.store(partial_ptr + at, tl.sum(dweight, axis=0), mask=column < width)


def _forward_constants(width: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(width), 1024)
    return {"BLOCK_ROWS": max(1, 2048 // block), "BLOCK_WIDTH": block, "num_warps": 4}


def _backward_constants(width: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(width), 512)
    return {"BLOCK_ROWS": max(1, 1024 // block), "BLOCK_WIDTH": block, "num_warps": 4}


def forward(x: Tensor, skip: Tensor, gate: Tensor, factor: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x, skip, gate [rows, width] with contiguous rows, factor, weight [width] -> p in the dtype of gate, squares
    [rows] fp32."""
    rows, width = x.shape
    product, squares = gate.new_empty(rows, width), x.new_empty(rows, dtype=torch.float32)
    constants = _forward_constants(width)
    forward_kernel[(triton.cdiv(rows, constants["BLOCK_ROWS"]),)](
        x, skip, gate, factor, weight, product, squares, x.stride(0), skip.stride(0), gate.stride(0), rows, width,
        **constants,
    )  # fmt: skip
    return product, squares


def backward(
    dproduct: Tensor, dsquares: Tensor, x: Tensor, skip: Tensor, gate: Tensor, factor: Tensor, weight: Tensor,
    dgate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes dx, dfactor and dweight, and writes dgate; dproduct and dgate as x, dsquares [rows] fp32 contiguous."""
    rows, width = x.shape
    dx = x.new_empty(rows, width)
    constants = _backward_constants(width)
    tiles = triton.cdiv(width, constants["BLOCK_WIDTH"])
    segments = min(triton.cdiv(rows, constants["BLOCK_ROWS"]), triton.cdiv(SEGMENTS, tiles))
    partial = x.new_empty(2, segments, width, dtype=torch.float32)
    backward_kernel[(segments, tiles)](
        dproduct, dsquares, x, skip, gate, factor, weight, dx, dgate, partial,
        dproduct.stride(0), x.stride(0), skip.stride(0), gate.stride(0), dgate.stride(0), rows, width,
        triton.cdiv(rows, segments),
        **constants,
    )  # fmt: skip
    return dx, partial[0].sum(0).to(factor.dtype), partial[1].sum(0).to(weight.dtype)
