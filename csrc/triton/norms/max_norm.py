"""MaxNorm, y = f c s x / (max |s x| + eps), optionally with a factor f per row and the cosines c of the row's position.

Bytes: forward reads x and writes y; backward reads x, dy and writes dx; plus four numbers a row. Programs take rows in
the order of memory. The table of cosines stays in the L2 cache, which serves it to the rows of all sequences; with wide
rows, the cache evicts x, dy, y and dx before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.row_parts import split


@triton.jit
def place_of(position_ptr, row, rows, period):
    """Row indices in the table of cosines, [R, 1] int64."""
    return tl.load(position_ptr + row % period, mask=row < rows, other=0).to(tl.int64)[:, None]


@triton.jit
def load_part(x_ptr, row, rows, column, width, ONCE: tl.constexpr):
    """Loads [R, W] of the rows, zeros out of bounds. ONCE: the L2 cache evicts them first."""
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = x_ptr + row[:, None] * width + column[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def store_part(y_ptr, y, row, rows, column, width, ONCE: tl.constexpr):
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = y_ptr + row[:, None] * width + column[None, :]
    tl.store(at, y, mask=mask, eviction_policy="evict_first" if ONCE else "")


@triton.jit
def load_cosines(cosine_ptr, place, column, width, HEAD_DIM: tl.constexpr, KEEP: tl.constexpr):
    """Loads c [R, W] fp32; one without a table. KEEP: the L2 cache evicts them last."""
    cosines = 1.0
    if HEAD_DIM > 0:
        at = cosine_ptr + place * HEAD_DIM + (column % HEAD_DIM)[None, :]
        inside = (column < width)[None, :] & (place >= 0)
        cosines = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last" if KEEP else "").to(tl.float32)
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
    KEEP_TABLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    factor, place = 1.0, 0
    if HEAD_DIM > 0:
        place = place_of(position_ptr, row, rows, period)
    # All loads are issued before the first reduction, which synchronizes the threads.
    column = tl.arange(0, BLOCK_WIDTH)
    x = load_part(x_ptr, row, rows, column, width, KEEP_TABLE)
    if REST_WIDTH > 0:
        rest_column = BLOCK_WIDTH + tl.arange(0, REST_WIDTH)
        rest = load_part(x_ptr, row, rows, rest_column, width, KEEP_TABLE)
    scale = load_scale(scale_ptr)
    if HEAD_DIM > 0:
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
    cosines = load_cosines(cosine_ptr, place, column, width, HEAD_DIM, KEEP_TABLE)
    if REST_WIDTH > 0:
        rest_cosines = load_cosines(cosine_ptr, place, rest_column, width, HEAD_DIM, KEEP_TABLE)
    key = largest_key(x, column)
    if REST_WIDTH > 0:
        key = tl.maximum(key, largest_key(rest, rest_column))
    largest = magnitude_of(key, x_ptr.dtype.element_ty)
    peak = scale * largest + eps
    tl.store(peak_ptr + row, peak, mask=row < rows)
    tl.store(index_ptr + row, 65535 - (key & 0xFFFF).to(tl.int32), mask=row < rows)
    inverse = (scale / peak)[:, None]
    y = encode(x.to(tl.float32) * inverse, factor, cosines, HEAD_DIM)
    store_part(y_ptr, y, row, rows, column, width, KEEP_TABLE)
    if REST_WIDTH > 0:
        rest_y = encode(rest.to(tl.float32) * inverse, factor, rest_cosines, HEAD_DIM)
        store_part(y_ptr, rest_y, row, rows, rest_column, width, KEEP_TABLE)


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
    KEEP_TABLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    factor, place = 1.0, 0
    if HEAD_DIM > 0:
        place = place_of(position_ptr, row, rows, period)
    column = tl.arange(0, BLOCK_WIDTH)
    x = load_part(x_ptr, row, rows, column, width, KEEP_TABLE).to(tl.float32)
    dy = load_part(dy_ptr, row, rows, column, width, KEEP_TABLE).to(tl.float32)
    if HEAD_DIM > 0:
        factor = tl.load(factor_ptr + row, mask=row < rows, other=0.0)[:, None]
    inverse = load_scale(scale_ptr) / tl.load(peak_ptr + row, mask=row < rows, other=1.0)[:, None]
    index = tl.load(index_ptr + row, mask=row < rows, other=0)[:, None]
    dy = encode(dy, factor, load_cosines(cosine_ptr, place, column, width, HEAD_DIM, KEEP_TABLE), HEAD_DIM)
    unit = x * inverse
    if REST_WIDTH > 0:
        rest_column = BLOCK_WIDTH + tl.arange(0, REST_WIDTH)
        rest_unit = load_part(x_ptr, row, rows, rest_column, width, KEEP_TABLE).to(tl.float32) * inverse
        rest_dy = load_part(dy_ptr, row, rows, rest_column, width, KEEP_TABLE).to(tl.float32)
        rest_cosines = load_cosines(cosine_ptr, place, rest_column, width, HEAD_DIM, KEEP_TABLE)
        rest_dy = encode(rest_dy, factor, rest_cosines, HEAD_DIM)
    pull = tl.sum(dy * unit, axis=1)[:, None]
    if REST_WIDTH > 0:
        pull += tl.sum(rest_dy * rest_unit, axis=1)[:, None]
        rest_dx = gradient(rest_dy, rest_unit, inverse, pull, index, rest_column)
        store_part(dx_ptr, rest_dx, row, rows, rest_column, width, KEEP_TABLE)
    dx = gradient(dy, unit, inverse, pull, index, column)
    store_part(dx_ptr, dx, row, rows, column, width, KEEP_TABLE)


EncodingTensors = tuple[Tensor, Tensor, Tensor]
"""Factors [rows] fp32; positions [period] integers, for row r positions[r mod period], an index into the rows of the
table of cosines; and that table [positions, K], repeated along the width."""


KEPT_TABLE_WIDTH = 4096
"""Padded width from which the L2 cache keeps the table of cosines; hints cost narrower rows time on an H100."""


def _launch(
    rows: int, width: int, encoding: EncodingTensors | None, *, backward: bool
) -> tuple[int, int, dict[str, int]]:
    """Number of programs, period and kernel constants."""
    block_width, rest_width = split(width)
    block_rows = max(1, 2048 // block_width)
    wide = rest_width or (encoding is not None and block_width == 8192)
    warps = 32 if block_width > 8192 else 16 if wide and backward else min(8, max(4, block_width // 512))
    constants = {
        "HEAD_DIM": 0 if encoding is None else encoding[2].shape[1],
        "KEEP_TABLE": encoding is not None and block_width >= KEPT_TABLE_WIDTH,
        "BLOCK_ROWS": block_rows,
        "BLOCK_WIDTH": block_width,
        "REST_WIDTH": rest_width,
        "num_warps": warps,
    }
    return triton.cdiv(rows, block_rows), rows if encoding is None else encoding[1].numel(), constants


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
