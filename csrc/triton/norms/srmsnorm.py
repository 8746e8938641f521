"""SRMSNorm, y = x (mean(x^2) + eps)^(-1/2): one program per row block, forward and backward.

Bytes: forward reads x and writes y (and one fp32 a row); backward reads x, dy and that fp32 and writes dx.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.row_parts import split


@triton.jit
def forward_kernel(x_ptr, y_ptr, scale_ptr, rows, width, eps, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(y_ptr + offset, x * scale[:, None], mask=mask)
    tl.store(scale_ptr + row, scale, mask=row < rows)


@triton.jit
def backward_kernel(dy_ptr, x_ptr, scale_ptr, dx_ptr, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None]
    unit = x * scale
    dx = scale * (dy - unit * (tl.sum(unit * dy, axis=1) / width)[:, None])
    tl.store(dx_ptr + offset, dx, mask=mask)


@triton.jit
def wide_backward_kernel(dy_ptr, x_ptr, scale_ptr, dx_ptr, width, BLOCK_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):
    """Processes one row per program, in two parts: a single power of two would be up to half empty."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    rest_column = BLOCK_WIDTH + tl.arange(0, REST_WIDTH)
    offset, rest_offset, rest_mask = row * width + column, row * width + rest_column, rest_column < width
    scale = tl.load(scale_ptr + row)
    unit = tl.load(x_ptr + offset).to(tl.float32) * scale
    dy = tl.load(dy_ptr + offset).to(tl.float32)
    rest_unit = tl.load(x_ptr + rest_offset, mask=rest_mask, other=0.0).to(tl.float32) * scale
    rest_dy = tl.load(dy_ptr + rest_offset, mask=rest_mask, other=0.0).to(tl.float32)
    pull = (tl.sum(unit * dy, axis=0) + tl.sum(rest_unit * rest_dy, axis=0)) / width
    tl.store(dx_ptr + offset, scale * (dy - unit * pull))
    tl.store(dx_ptr + rest_offset, scale * (rest_dy - rest_unit * pull), mask=rest_mask)


def _launch(rows: int, width: int, *, backward: bool) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants: a row block of about 8192 elements."""
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, 8192 // block_width)
    warps = min(16, max(4, block_rows * block_width // 1024))
    if backward and block_width > 8192:
        warps = 32  # two such rows do not fit into the registers of sixteen
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_WIDTH": block_width, "num_warps": warps}
    return (triton.cdiv(rows, block_rows),), constants


def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [rows, width] contiguous -> y like x, and the fp32 scale [rows]."""
    rows, width = x.shape
    y, scale = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    grid, constants = _launch(rows, width, backward=False)
    forward_kernel[grid](x, y, scale, rows, width, eps, **constants)
    return y, scale


def backward(dy: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """dy, x [rows, width] contiguous, scale [rows] -> dx like x."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    block_width, rest_width = split(width)
    if rest_width:
        wide_backward_kernel[(rows,)](
            dy, x, scale, dx, width, BLOCK_WIDTH=block_width, REST_WIDTH=rest_width, num_warps=8
        )
        return dx
    grid, constants = _launch(rows, width, backward=True)
    backward_kernel[grid](dy, x, scale, dx, rows, width, **constants)
    return dx
