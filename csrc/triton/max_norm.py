"""MaxNorm, y = f c x / (max |x| + eps), f one factor a row and c = cos(p theta) of Cosine RelPE, both or neither.

Bytes: forward reads x and writes y; backward reads x, dy and writes dx. Four numbers a row, one a column beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

TURNS = 16
"""Sequences that a program takes one after the other, with the same cosines."""


@triton.jit
def cosine(position, frequency):
    """-cos(2 pi p F / 2^32) for int32 p and F: the product wraps, which leaves the fraction of a turn.

    Its upper 23 bits as the mantissa of a number in [1, 2), less 1.5, lie half a turn away.
    """
    fraction = (position * frequency).to(tl.uint32, bitcast=True) >> 9
    turn = (fraction | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
    z = turn * turn
    y = 6.528658390045166 * z - 25.967599868774414
    y = y * z + 60.16762924194336
    y = y * z - 85.45014190673828
    y = y * z + 64.93911743164062
    y = y * z - 19.73920440673828
    return y * z + 1.0


@triton.jit(do_not_specialize=["period", "batch", "turns"])
def forward_kernel(
    x_ptr,
    factor_ptr,
    position_ptr,
    frequency_ptr,
    y_ptr,
    peak_ptr,
    index_ptr,
    period,
    batch,
    turns,
    width,
    eps,
    ENCODED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Rows b `period` + t of a block of t, for `turns` of the b < `batch`: those have the position of t."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (t < period)[:, None] & (column < width)[None, :]
    if ENCODED:
        position = tl.load(position_ptr + t, mask=t < period, other=0)
        frequency = tl.load(frequency_ptr + column, mask=column < width, other=0)
        gain = cosine(position[:, None], frequency[None, :])
    first = tl.program_id(1) * turns
    row = t + first.to(tl.int64) * period
    for _ in range(first, tl.minimum(first + turns, batch)):
        offset = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(x), axis=1)
        # The first of equals, as torch.max has it; an integer minimum is cheaper than an indexed maximum.
        index = tl.min(tl.where(tl.abs(x) == largest[:, None], column[None, :], BLOCK_WIDTH), axis=1)
        tl.store(peak_ptr + row, largest + eps, mask=t < period)
        tl.store(index_ptr + row, index, mask=t < period)
        scale = 1.0 / (largest + eps)
        if ENCODED:
            scale *= -tl.load(factor_ptr + row, mask=t < period, other=0.0)
            x *= gain
        tl.store(y_ptr + offset, x * scale[:, None], mask=mask)
        row += period


@triton.jit(do_not_specialize=["period", "batch", "turns"])
def backward_kernel(
    dy_ptr,
    x_ptr,
    factor_ptr,
    position_ptr,
    frequency_ptr,
    peak_ptr,
    index_ptr,
    dx_ptr,
    period,
    batch,
    turns,
    width,
    ENCODED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (t < period)[:, None] & (column < width)[None, :]
    if ENCODED:
        position = tl.load(position_ptr + t, mask=t < period, other=0)
        frequency = tl.load(frequency_ptr + column, mask=column < width, other=0)
        gain = cosine(position[:, None], frequency[None, :])
    first = tl.program_id(1) * turns
    row = t + first.to(tl.int64) * period
    for _ in range(first, tl.minimum(first + turns, batch)):
        offset = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.load(peak_ptr + row, mask=t < period, other=1.0)
        index = tl.load(index_ptr + row, mask=t < period, other=0)[:, None]
        scale = inverse
        if ENCODED:
            scale *= -tl.load(factor_ptr + row, mask=t < period, other=0.0)
            dy *= gain
        dx = dy * scale[:, None]
        pull = (tl.sum(dx * x, axis=1) * inverse)[:, None]
        # The largest element carries the whole row's pull.
        pull = tl.where(x > 0.0, pull, tl.where(x < 0.0, -pull, 0.0))
        tl.store(dx_ptr + offset, tl.where(column[None, :] == index, dx - pull, dx), mask=mask)
        row += period


def _launch(period: int, batch: int, width: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Grid, turns and constants: 8 elements a thread, 16 of the widest rows."""
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, 1024 // block_width)
    constants = {
        "BLOCK_ROWS": block_rows,
        "BLOCK_WIDTH": block_width,
        "num_warps": min(32, max(4, block_width // 256)),
    }
    turns = min(batch, TURNS)
    return (triton.cdiv(period, block_rows), triton.cdiv(batch, turns)), turns, constants


Encoding = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Factors [rows] fp32, the positions [T] int32 of rows b T + t, and frequencies [width] int32, in 2^-32 turns a
position. Without: three times None."""


def _period(rows: int, encoding: Encoding) -> int:
    return rows if encoding[1] is None else encoding[1].numel()


def forward(x: Tensor, encoding: Encoding, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, width] contiguous -> y like x; max |x| + eps [rows] fp32 and where it lies [rows] int32."""
    rows, width = x.shape
    y, peak = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    index = x.new_empty(rows, dtype=torch.int32)
    period, encoded = _period(rows, encoding), encoding[0] is not None
    batch = rows // period
    grid, turns, constants = _launch(period, batch, width)
    forward_kernel[grid](x, *encoding, y, peak, index, period, batch, turns, width, eps, ENCODED=encoded, **constants)
    return y, peak, index


def backward(dy: Tensor, x: Tensor, encoding: Encoding, peak: Tensor, index: Tensor) -> Tensor:
    """dy, x [rows, width] contiguous, the rest as the forward took and gave it -> dx like x."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    period, encoded = _period(rows, encoding), encoding[0] is not None
    batch = rows // period
    grid, turns, constants = _launch(period, batch, width)
    backward_kernel[grid](dy, x, *encoding, peak, index, dx, period, batch, turns, width, ENCODED=encoded, **constants)
    return dx


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, int], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    cases = []
    for width in (64, 1024, 4096, 8192, 12288):
        constants = _launch(512, 8, width)[2] | {"ENCODED": True}
        options = {"num_warps": constants.pop("num_warps")}
        rows = {"factor_ptr": "*fp32", "position_ptr": "*i32", "frequency_ptr": "*i32"}
        counts = dict.fromkeys(("period", "batch", "turns", "width"), "i32")
        common = {**rows, **counts, "peak_ptr": "*fp32", "index_ptr": "*i32", "x_ptr": "*bf16"}
        cases.append((forward_kernel, {**common, "y_ptr": "*bf16", "eps": "fp32"}, constants, options))
        cases.append((backward_kernel, {**common, "dy_ptr": "*bf16", "dx_ptr": "*bf16"}, constants, options))
    return cases
