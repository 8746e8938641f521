"""Deterministic sum over the rows of a small fp32 matrix, such as the partial sums of a kernel's programs."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

BLOCK_WIDTH = 16
MAX_BLOCK_ROWS = 512
"""Rows loaded at once, so that a few hundred cost the latency of one load."""


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(x_ptr, y_ptr, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(x_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + column, tl.sum(total, axis=0), mask=column < width)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums: x [rows, width] fp32, contiguous, rows width < 2^31 -> [width] in `dtype`."""
    rows, width = x.shape
    y = x.new_empty(width, dtype=dtype)
    block_rows = min(MAX_BLOCK_ROWS, triton.next_power_of_2(rows))
    grid = (triton.cdiv(width, BLOCK_WIDTH),)
    sum_kernel[grid](x, y, rows, width, BLOCK_ROWS=block_rows, BLOCK_WIDTH=BLOCK_WIDTH, num_warps=8)
    return y
