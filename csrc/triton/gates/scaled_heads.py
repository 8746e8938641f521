"""Computes y = f x, one factor f per row of x (Mamba-2's values times their time steps); backward df = sum of dy x.

Bytes: forward reads x and writes y; backward reads dy and x; f and df, one number a row, are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

ELEMENTS, WARPS = 2048, 4
"""Elements and warps of a tile of full rows."""


@triton.jit
def _tile(row_0, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows, offsets and mask of this program."""
    row = row_0.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    return row, row[:, None] * width + column[None, :], (row < rows)[:, None] & (column < width)[None, :]


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, factor_ptr, y_ptr, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):  # fmt: skip
    row, offset, mask = _tile(tl.program_id(0), rows, width, BLOCK_ROWS, BLOCK_WIDTH)
    factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
    tl.store(y_ptr + offset, factor * tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr, x_ptr, dfactor_ptr, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):  # fmt: skip
    row, offset, mask = _tile(tl.program_id(0), rows, width, BLOCK_ROWS, BLOCK_WIDTH)
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(dfactor_ptr + row, tl.sum(dy * x, axis=1), mask=row < rows)


def _constants(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK_ROWS": max(1, ELEMENTS // block), "BLOCK_WIDTH": block}


def forward(x: Tensor, factor: Tensor) -> Tensor:
    """x [rows, width] and factor [rows] fp32, contiguous -> [rows, width] in the dtype of x."""
    rows, width = x.shape
    y, constants = torch.empty_like(x), _constants(width)
    grid = (triton.cdiv(rows, constants["BLOCK_ROWS"]),)
    forward_kernel[grid](x, factor, y, rows, width, **constants, num_warps=WARPS)
    return y


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """dy and x [rows, width], contiguous -> dfactor [rows] fp32."""
    rows, width = x.shape
    dfactor, constants = x.new_empty(rows, dtype=torch.float32), _constants(width)
    grid = (triton.cdiv(rows, constants["BLOCK_ROWS"]),)
    backward_kernel[grid](dy, x, dfactor, rows, width, **constants, num_warps=WARPS)
    return dfactor
