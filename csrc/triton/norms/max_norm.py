"""MaxNorm, y = f c s x / (max |s x| + eps), optionally with a factor f per row and the cosines c of the row's position.

Bytes: forward reads x and writes y; backward reads x, dy and writes dx; plus four numbers a row and the table of
cosines once, since rows of equal position are in the same or in consecutive programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.row_parts import split


@triton.jit
def rows_of_program(rows, period, SHARED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Row indices of this program, [R] int64; out of range from `rows` on."""
    program = tl.program_id(0)
    block = tl.arange(0, BLOCK_ROWS)
    if SHARED:  # rows b period + t with the same t, which consecutive programs process
        batch = rows // period
        blocks = tl.cdiv(batch, BLOCK_ROWS)
        b = program % blocks * BLOCK_ROWS + block
        row = b.to(tl.int64) * period + program // blocks
    else:
        row = program.to(tl.int64) * BLOCK_ROWS + block
    return row


@triton.jit
def place_of(position_ptr, row, rows, period, SHARED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Row indices in the table of cosines, [1, 1] or [R, 1] int64."""
    if SHARED:
        t = tl.program_id(0) // tl.cdiv(rows // period, BLOCK_ROWS) + tl.zeros([1], dtype=tl.int32)
        place = tl.load(position_ptr + t)
    else:
        place = tl.load(position_ptr + row % period, mask=row < rows, other=0)
    return place.to(tl.int64)[:, None]


@triton.jit
def load_part(x_ptr, row, rows, column, width):
    """Loads [R, W] of the rows, zeros out of bounds."""
    mask = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(x_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_part(y_ptr, y, row, rows, column, width):
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(y_ptr + row[:, None] * width + column[None, :], y, mask=mask)


@triton.jit
def load_cosines(cosine_ptr, place, column, width, HEAD_DIM: tl.constexpr):
    """Loads c [1 or R, W] fp32; one without a table."""
    cosines = 1.0
    if HEAD_DIM > 0:
        element = (column % HEAD_DIM)[None, :]
        inside = (column < width)[None, :] & (place >= 0)
        cosines = tl.load(cosine_ptr + place * HEAD_DIM + element, mask=inside, other=0.0).to(tl.float32)
    return cosines


@triton.jit
def load_scale(scale_ptr):
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    return scale


@triton.jit
def encode(x, factor, cosines, HEAD_DIM: tl.constexpr):
    """Computes f c x, exactly zero in rows of f = 0, even for non-finite x."""
    if HEAD_DIM > 0:
        x = tl.where(factor == 0.0, 0.0, x * (factor * cosines))
    return x


@triton.jit
def largest_key(x, column):
    """Bits of each row's largest magnitude, followed by 16 bits of its inverted column: one reduction finds both, and
    the first of equal values wins, as in torch.max."""
    if x.dtype.primitive_bitwidth == 16:
        magnitude = (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32) << 16
        key = magnitude | (65535 - column)[None, :]
    else:
        magnitude = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) << 16
        key = magnitude | (65535 - column)[None, :].to(tl.int64)
    return tl.max(key, axis=1)


@triton.jit
def magnitude_of(key, dtype: tl.constexpr):
    if dtype.primitive_bitwidth == 16:
        bits = (key >> 16).to(tl.int16)
    else:
        bits = (key >> 16).to(tl.int32)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "period"])
def forward_kernel(
    x_ptr,
    factor_ptr,
    position_ptr,
    cosine_ptr,
    scale_ptr,
    y_ptr,
    peak_ptr,
    index_ptr,
    rows,
    period,
    width,
    eps,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
):
    row = rows_of_program(rows, period, SHARED, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    x = load_part(x_ptr, row, rows, column, width)
    scale = load_scale(scale_ptr)
    factor, place = 1.0, 0
    if HEAD_DIM > 0:
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
        place = place_of(position_ptr, row, rows, period, SHARED, BLOCK_ROWS)
    cosines = load_cosines(cosine_ptr, place, column, width, HEAD_DIM)
    if REST_WIDTH > 0:  # issue all loads before the first reduction, which synchronizes the threads
        rest_column = BLOCK_WIDTH + tl.arange(0, REST_WIDTH)
        rest = load_part(x_ptr, row, rows, rest_column, width)
        rest_cosines = load_cosines(cosine_ptr, place, rest_column, width, HEAD_DIM)
    key = largest_key(x, column)
    if REST_WIDTH > 0:
        key = tl.maximum(key, largest_key(rest, rest_column))
    largest = magnitude_of(key, x_ptr.dtype.element_ty)
    peak = scale * largest + eps
    tl.store(peak_ptr + row, peak, mask=row < rows)
    tl.store(index_ptr + row, 65535 - (key & 0xFFFF).to(tl.int32), mask=row < rows)
    inverse = (scale / peak)[:, None]
    store_part(y_ptr, encode(x.to(tl.float32) * inverse, factor, cosines, HEAD_DIM), row, rows, column, width)
    if REST_WIDTH > 0:
        store_part(
            y_ptr, encode(rest.to(tl.float32) * inverse, factor, rest_cosines, HEAD_DIM), row, rows, rest_column, width
        )


@triton.jit
def gradient(dy, unit, inverse, pull, index, column):
    """Computes dx; only the largest element gets the gradient of the maximum, `pull`."""
    sign = tl.where(unit > 0.0, 1.0, 0.0) - tl.where(unit < 0.0, 1.0, 0.0)
    return inverse * tl.where(column[None, :] == index, dy - sign * pull, dy)


@triton.jit(do_not_specialize=["rows", "period"])
def backward_kernel(
    dy_ptr,
    x_ptr,
    factor_ptr,
    position_ptr,
    cosine_ptr,
    scale_ptr,
    peak_ptr,
    index_ptr,
    dx_ptr,
    rows,
    period,
    width,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
):
    row = rows_of_program(rows, period, SHARED, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    x = load_part(x_ptr, row, rows, column, width).to(tl.float32)
    dy = load_part(dy_ptr, row, rows, column, width).to(tl.float32)
    factor, place = 1.0, 0
    if HEAD_DIM > 0:
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
        place = place_of(position_ptr, row, rows, period, SHARED, BLOCK_ROWS)
    inverse = load_scale(scale_ptr) / tl.load(peak_ptr + row, mask=row < rows, other=1.0)[:, None]
    index = tl.load(index_ptr + row, mask=row < rows, other=0)[:, None]
    dy = encode(dy, factor, load_cosines(cosine_ptr, place, column, width, HEAD_DIM), HEAD_DIM)
    unit = x * inverse
    if REST_WIDTH > 0:
        rest_column = BLOCK_WIDTH + tl.arange(0, REST_WIDTH)
        rest_unit = load_part(x_ptr, row, rows, rest_column, width).to(tl.float32) * inverse
        rest_dy = load_part(dy_ptr, row, rows, rest_column, width).to(tl.float32)
        rest_cosines = load_cosines(cosine_ptr, place, rest_column, width, HEAD_DIM)
        rest_dy = encode(rest_dy, factor, rest_cosines, HEAD_DIM)
    pull = tl.sum(dy * unit, axis=1)[:, None]
    if REST_WIDTH > 0:
        pull += tl.sum(rest_dy * rest_unit, axis=1)[:, None]
        rest_dx = gradient(rest_dy, rest_unit, inverse, pull, index, rest_column)
        store_part(dx_ptr, rest_dx, row, rows, rest_column, width)
    store_part(dx_ptr, gradient(dy, unit, inverse, pull, index, column), row, rows, column, width)


EncodingTensors = tuple[Tensor, Tensor, Tensor]
"""Factors [rows] fp32; positions [period] integers, for row r positions[r mod period], an index into the rows of the
table of cosines; and that table [positions, K], repeated along the width."""


ENCODED_FORWARD = {1024: (4, 4), 2048: (1, 2)}
"""Padded width -> (rows per program, warps) where the rule of `_launch` is not the fastest, measured on an H200."""


def _launch(
    rows: int, width: int, encoding: EncodingTensors | None, *, backward: bool
) -> tuple[int, int, dict[str, int]]:
    """Number of programs, period and kernel constants."""
    block_width, rest_width = split(width)
    block_rows = max(1, 2048 // block_width)
    warps = 32 if block_width > 8192 else 16 if rest_width and backward else min(8, max(4, block_width // 512))
    period, shared = rows, False
    if encoding is not None:
        period = encoding[1].numel()
        if not backward:
            block_rows, warps = ENCODED_FORWARD.get(block_width, (block_rows, warps))
        shared = rows // period >= block_rows
    programs = period * triton.cdiv(rows // period, block_rows) if shared else triton.cdiv(rows, block_rows)
    constants = {
        "HEAD_DIM": 0 if encoding is None else encoding[2].shape[1],
        "SHARED": shared,
        "BLOCK_ROWS": block_rows,
        "BLOCK_WIDTH": block_width,
        "REST_WIDTH": rest_width,
        "num_warps": warps,
    }
    return programs, period, constants


def forward(
    x: Tensor, encoding: EncodingTensors | None, scale: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, width] contiguous, scale s [] or None for one -> y like x; max |s x| + eps [rows] fp32 and its index
    [rows] int32."""
    rows, width = x.shape
    y, peak = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    index = x.new_empty(rows, dtype=torch.int32)
    programs, period, constants = _launch(rows, width, encoding, backward=False)
    forward_kernel[(programs,)](
        x, *(encoding or (None, None, None)), scale, y, peak, index, rows, period, width, eps, **constants
    )
    return y, peak, index


def backward(
    dy: Tensor, x: Tensor, encoding: EncodingTensors | None, scale: Tensor | None, peak: Tensor, index: Tensor
) -> Tensor:
    """dy, x [rows, width] contiguous, the rest as passed to or returned by `forward` -> dx like x."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs, period, constants = _launch(rows, width, encoding, backward=True)
    backward_kernel[(programs,)](
        dy, x, *(encoding or (None, None, None)), scale, peak, index, dx, rows, period, width, **constants
    )
    return dx
