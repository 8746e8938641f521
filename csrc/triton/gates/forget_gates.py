"""Computes k = (1 - b) sigmoid(-l) and g = log(b + (1 - b) sigmoid(l)) of logits l [rows, D] and bounds b [D].

With p = sigmoid(l), s = sigmoid(-l) and f = b + (1 - b) p, where b = 0 has no gradient through log b:

    dl = s (dg (1 - b) p / f - dk (1 - b) p),    db = sum over rows of dg s / f (b = 0: -dg p / f) - dk s

Bytes: forward reads l and writes k and g (fp32); backward reads l, dk, dg and writes dl. Each backward program iterates
over a segment of rows for a tile of columns and accumulates a partial db; the partial sums are added afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

ROWS, COLUMNS, WARPS = 4, 256, 2
SEGMENTS = 1056
"""Programs of the backward, eight per multiprocessor of an H200."""
SMALLEST = tl.constexpr(1e-30)
"""Threshold of f below which b is 0 and sigmoid(l) is e^l."""
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _gates(logit, bound):
    """Computes p, s, f with one exponential, exp(-|l|), so that neither p nor s suffers cancellation."""
    small = tl.exp(-tl.abs(logit))
    larger = 1.0 / (1.0 + small)
    lesser, negative = small * larger, logit < 0.0
    p, s = tl.where(negative, lesser, larger), tl.where(negative, larger, lesser)
    return p, s, bound + (1.0 - bound) * p


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    logit_ptr, bound_ptr, k_ptr, g_ptr, logit_row, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(width, BLOCK_WIDTH)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % tiles * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    logit = tl.load(logit_ptr + row[:, None] * logit_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    bound = tl.load(bound_ptr + column, mask=column < width, other=0.0)[None, :]
    _, s, f = _gates(logit, bound)
    k = (1.0 - bound) * s
    # log f, or log(1 - k) without the cancellation of a small k (Kahan): the more accurate one, by one logarithm.
    rest, low = 1.0 - k, f < 0.5
    log = tl.log(tl.where(low, f, rest))
    near_one = tl.where(rest == 1.0, -k, log * (k / (1.0 - rest)))
    g = tl.where(low, tl.where(f < SMALLEST, logit, log), near_one)
    offset = row[:, None] * width + column[None, :]
    tl.store(k_ptr + offset, k, mask=mask)
    tl.store(g_ptr + offset, g, mask=mask)


@triton.jit(do_not_specialize=["rows", "segment_rows"])
def backward_kernel(
    logit_ptr, bound_ptr, dk_ptr, dg_ptr, dlogit_ptr, partial_ptr,  # partial [segments, D] fp32
    logit_row, dk_row, dg_row, rows, width, segment_rows, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * segment_rows
    end = tl.minimum(first + segment_rows, rows)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    bound = tl.load(bound_ptr + column, mask=column < width, other=0.0)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for start in range(0, segment_rows, BLOCK_ROWS):
        row = first + start + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        logit = tl.load(logit_ptr + row[:, None] * logit_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dk = tl.load(dk_ptr + row[:, None] * dk_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + row[:, None] * dg_row + column[None, :], mask=mask, other=0.0)
        p, s, f = _gates(logit, bound)
        weight = (1.0 - bound) * p
        inverse = 1.0 / tl.maximum(f, SMALLEST)
        ratio = tl.where(f < SMALLEST, 1.0, weight * inverse)
        dlogit = s * (dg * ratio - dk * weight)
        tl.store(dlogit_ptr + row[:, None] * width + column[None, :], dlogit, mask=mask)
        moved = tl.where(bound < TINY, tl.where(f < SMALLEST, -1.0, -p * inverse), s * inverse)
        total += dg * moved - dk * s
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * width + column, tl.sum(total, axis=0), mask=column < width)


def forward(logit: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """logit [rows, D] with contiguous rows, bound [D] fp32 contiguous -> k as logit and g in fp32, [rows, D]."""
    rows, width = logit.shape
    k, g = logit.new_empty(rows, width), logit.new_empty(rows, width, dtype=torch.float32)
    forward_kernel[(triton.cdiv(rows, ROWS) * triton.cdiv(width, COLUMNS),)](
        logit, bound, k, g, logit.stride(0), rows, width, BLOCK_ROWS=ROWS, BLOCK_WIDTH=COLUMNS, num_warps=WARPS
    )
    return k, g


def backward(dk: Tensor, dg: Tensor, logit: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of logit (contiguous) and bound; dk and dg (fp32) with contiguous rows."""
    rows, width = logit.shape
    dlogit, tiles = logit.new_empty(rows, width), triton.cdiv(width, COLUMNS)
    segments = min(triton.cdiv(rows, ROWS), triton.cdiv(SEGMENTS, tiles))
    partial = bound.new_empty(segments, width)
    backward_kernel[(segments, tiles)](
        logit, bound, dk, dg, dlogit, partial, logit.stride(0), dk.stride(0), dg.stride(0), rows, width,
        triton.cdiv(rows, segments), BLOCK_ROWS=ROWS, BLOCK_WIDTH=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return dlogit, partial.sum(0)
