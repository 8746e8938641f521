"""MaxNorm, y = f c x / (max |x| + eps), f one factor a row and c = cos(p theta) of Cosine RelPE, both or neither.

Bytes: forward reads x and writes y; backward reads x, dy and writes dx. Four numbers a row, one a column beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

ENCODED_TURNS = 4
"""Blocks of rows that a program takes one after the other, where they share frequencies."""
ENCODED_WARPS = {4096: (8, 16), 8192: (32, 8), 16384: (16, 16)}
"""Forward and backward, by the padded width, where four are not the fastest: measured on an H200."""


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


@triton.jit
def encode(x, factor_ptr, position_ptr, frequency, row, end):
    """f c x [R, W], exact zeros in rows of f = 0, where x may be anything."""
    factor = tl.load(factor_ptr + row, mask=row < end, other=0.0)[:, None]
    position = tl.load(position_ptr + row, mask=row < end, other=0)[:, None]
    return tl.where(factor == 0.0, 0.0, x * (-factor * cosine(position, frequency)))


@triton.jit
def forward_rows(
    x_ptr,
    factor_ptr,
    position_ptr,
    frequency,
    y_ptr,
    peak_ptr,
    index_ptr,
    row,
    column,
    end,
    width,
    eps,
    ENCODED: tl.constexpr,
):
    mask = (row < end)[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    # The first of equals, as torch.max has it; an integer minimum is cheaper than an indexed maximum.
    index = tl.min(tl.where(tl.abs(x) == largest[:, None], column[None, :], width), axis=1)
    peak = largest + eps
    tl.store(peak_ptr + row, peak, mask=row < end)
    tl.store(index_ptr + row, index, mask=row < end)
    y = x * (1.0 / peak)[:, None]
    if ENCODED:
        y = encode(y, factor_ptr, position_ptr, frequency, row, end)
    tl.store(y_ptr + offset, y, mask=mask)


@triton.jit
def backward_rows(
    dy_ptr,
    x_ptr,
    factor_ptr,
    position_ptr,
    frequency,
    peak_ptr,
    index_ptr,
    dx_ptr,
    row,
    column,
    end,
    width,
    ENCODED: tl.constexpr,
):
    mask = (row < end)[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    inverse = 1.0 / tl.load(peak_ptr + row, mask=row < end, other=1.0)[:, None]
    index = tl.load(index_ptr + row, mask=row < end, other=0)[:, None]
    unit = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) * inverse
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if ENCODED:
        dy = encode(dy, factor_ptr, position_ptr, frequency, row, end)
    pull = tl.sum(dy * unit, axis=1)[:, None]
    sign = tl.where(unit > 0.0, 1.0, 0.0) - tl.where(unit < 0.0, 1.0, 0.0)
    # The largest element carries the whole row's pull.
    dx = inverse * tl.where(column[None, :] == index, dy - sign * pull, dy)
    tl.store(dx_ptr + offset, dx, mask=mask)


@triton.jit(do_not_specialize=["rows", "program_rows"])
def forward_kernel(
    x_ptr,
    factor_ptr,
    position_ptr,
    frequency_ptr,
    y_ptr,
    peak_ptr,
    index_ptr,
    rows,
    program_rows,
    width,
    eps,
    ENCODED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * program_rows + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    x, f, p, y, m, i = x_ptr, factor_ptr, position_ptr, y_ptr, peak_ptr, index_ptr
    if ENCODED:  # frequencies are read once for all rows of the program
        frequency = tl.load(frequency_ptr + column, mask=column < width, other=0)[None, :]
        for start in range(0, program_rows, BLOCK_ROWS):
            forward_rows(x, f, p, frequency, y, m, i, first + start, column, rows, width, eps, True)
    else:
        forward_rows(x, f, p, 0, y, m, i, first, column, rows, width, eps, False)


@triton.jit(do_not_specialize=["rows", "program_rows"])
def backward_kernel(
    dy_ptr,
    x_ptr,
    factor_ptr,
    position_ptr,
    frequency_ptr,
    peak_ptr,
    index_ptr,
    dx_ptr,
    rows,
    program_rows,
    width,
    ENCODED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * program_rows + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    dy, x, f, p, m, i, dx = dy_ptr, x_ptr, factor_ptr, position_ptr, peak_ptr, index_ptr, dx_ptr
    if ENCODED:
        frequency = tl.load(frequency_ptr + column, mask=column < width, other=0)[None, :]
        for start in range(0, program_rows, BLOCK_ROWS):
            backward_rows(dy, x, f, p, frequency, m, i, dx, first + start, column, rows, width, True)
    else:
        backward_rows(dy, x, f, p, 0, m, i, dx, first, column, rows, width, False)


def _launch(rows: int, width: int, encoded: bool, backward: bool) -> tuple[int, int, dict[str, int]]:
    """Programs, rows of each, constants; encoded rows share their frequencies."""
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, 2048 // block_width)
    program_rows = block_rows * (ENCODED_TURNS if encoded else 1)
    warps = ENCODED_WARPS.get(block_width, (4, 4))[backward] if encoded else min(32, max(4, block_width // 512))
    constants = {"BLOCK_ROWS": block_rows, "BLOCK_WIDTH": block_width, "num_warps": warps}
    return triton.cdiv(rows, program_rows), program_rows, constants


Encoding = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Factors [rows] fp32, positions [rows] int32 and frequencies [width] int32, in 2^-32 turns a position. Without: three
times None."""


def forward(x: Tensor, encoding: Encoding, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, width] contiguous -> y like x; max |x| + eps [rows] fp32 and where it lies [rows] int32."""
    rows, width = x.shape
    y, peak = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    index = x.new_empty(rows, dtype=torch.int32)
    encoded = encoding[0] is not None
    programs, program_rows, constants = _launch(rows, width, encoded, backward=False)
    forward_kernel[(programs,)](
        x, *encoding, y, peak, index, rows, program_rows, width, eps, ENCODED=encoded, **constants
    )
    return y, peak, index


def backward(dy: Tensor, x: Tensor, encoding: Encoding, peak: Tensor, index: Tensor) -> Tensor:
    """dy, x [rows, width] contiguous, the rest as the forward took and gave it -> dx like x."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    encoded = encoding[0] is not None
    programs, program_rows, constants = _launch(rows, width, encoded, backward=True)
    backward_kernel[(programs,)](
        dy, x, *encoding, peak, index, dx, rows, program_rows, width, ENCODED=encoded, **constants
    )
    return dx


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, int], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    rows = {"factor_ptr": "*fp32", "position_ptr": "*i32", "frequency_ptr": "*i32", "program_rows": "i32"}
    common = {**rows, "peak_ptr": "*fp32", "index_ptr": "*i32", "x_ptr": "*bf16", "rows": "i32", "width": "i32"}
    forward_types = {**common, "y_ptr": "*bf16", "eps": "fp32"}
    backward_types = {**common, "dy_ptr": "*bf16", "dx_ptr": "*bf16"}
    cases = []
    for width in (64, 1024, 4096):
        for encoded in (False, True):
            for kernel, types in ((forward_kernel, forward_types), (backward_kernel, backward_types)):
                constants = _launch(4096, width, encoded, backward=kernel is backward_kernel)[2]
                options = {"num_warps": constants.pop("num_warps")}
                cases.append((kernel, types, {**constants, "ENCODED": encoded}, options))
    return cases
