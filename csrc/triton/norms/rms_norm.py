"""RMSNorm, y = w x r with r = (mean(x^2) + eps)^(-1/2): forward by row blocks, backward by persistent programs.

Bytes: forward reads x and writes y; backward reads x, dy and writes dx. Each backward program accumulates a partial dw
over its rows; the partial sums are added afterwards, always in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.chips import shared_bytes
from megalin._triton.dispatch.column_sums import column_sums


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, weight_ptr, y_ptr, scale_ptr, rows, width, eps, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(y_ptr + offset, x * scale[:, None] * weight[None, :], mask=mask)
    tl.store(scale_ptr + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "program_rows"])
def backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    width,
    program_rows,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    end = tl.minimum((program + 1) * program_rows, rows)
    for start in tl.range(0, program_rows, BLOCK_ROWS, num_stages=STAGES):
        row = program * program_rows + start + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        scale = tl.load(scale_ptr + row, mask=row < end, other=0.0)[:, None]
        unit = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) * scale
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dweight += dy * unit
        dy *= weight
        dx = scale * (dy - unit * (tl.sum(unit * dy, axis=1) / width)[:, None])
        tl.store(dx_ptr + offset, dx, mask=mask)
    tl.store(partial_ptr + program * width + column, tl.sum(dweight, axis=0), mask=column < width)


REDUCTION_BYTES = 1024
"""Shared memory of the backward's sums over warps, at most."""
PROCESSORS = 132
"""Multiprocessors; the backward starts three programs per multiprocessor for narrow rows, one for wide ones."""


def _forward_constants(width: int) -> dict[str, int]:
    block_width = triton.next_power_of_2(width)
    warps = 32 if block_width > 8192 else min(16, max(4, block_width // 512))
    return {"BLOCK_ROWS": max(1, 4096 // block_width), "BLOCK_WIDTH": block_width, "num_warps": warps}


def _backward_constants(width: int, element_size: int) -> dict[str, int]:
    """Kernel constants such that the in-flight rows of x and dy, of STAGES - 1 stages, fill shared memory, and fit into
    that of the GPU."""
    block_width = triton.next_power_of_2(width)
    if width <= 2048:
        return {"STAGES": 4, "BLOCK_ROWS": 2048 // block_width, "BLOCK_WIDTH": block_width, "num_warps": 4}
    elements = max(8192, block_width)
    stage_bytes = 2 * elements * element_size
    most = 1 + (shared_bytes() - REDUCTION_BYTES) // stage_bytes
    stages = min(3 if 2 * stage_bytes <= 2**17 else 2, most)
    warps = 32 if block_width > 8192 else 16
    return {"STAGES": stages, "BLOCK_ROWS": elements // block_width, "BLOCK_WIDTH": block_width, "num_warps": warps}


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [rows, width] contiguous, weight [width] -> y like x, and the fp32 scale [rows]."""
    rows, width = x.shape
    y, scale = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    constants = _forward_constants(width)
    grid = (triton.cdiv(rows, constants["BLOCK_ROWS"]),)
    forward_kernel[grid](x, weight, y, scale, rows, width, eps, **constants)
    return y, scale


def backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """dy, x [rows, width] contiguous, weight [width], scale [rows] -> dx and dweight like x and weight."""
    rows, width = x.shape
    constants = _backward_constants(width, x.element_size())
    programs = min(triton.cdiv(rows, constants["BLOCK_ROWS"]), PROCESSORS * (3 if width <= 2048 else 1))
    dx, partial = torch.empty_like(x), x.new_empty(programs, width, dtype=torch.float32)
    program_rows = triton.cdiv(rows, programs)
    backward_kernel[(programs,)](dy, x, weight, scale, dx, partial, rows, width, program_rows, **constants)
    return dx, column_sums(partial, weight.dtype)
