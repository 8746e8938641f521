"""Draws of tokens by the inverse of the distribution function, in two passes over the logits of each row.

The first kernel finds the maximum and the sum of exponentials of each block of ids; the second, one program a row, the
block whose cumulative sum exceeds the draw, and then the id inside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.dependent_launch import dependent_launch, wait_for_inputs

BLOCK = 1024
"""Ids a block."""


@triton.jit
def block_kernel(
    logits_ptr, peak_ptr, sum_ptr, width, blocks, inverse_temperature, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
    logit *= inverse_temperature
    peak = tl.max(logit, axis=0)
    # A block without a possible token has the sum zero.
    total = tl.sum(tl.exp(logit - tl.where(peak == float("-inf"), 0.0, peak)), axis=0)
    tl.store(peak_ptr + row * blocks + block, peak)
    tl.store(sum_ptr + row * blocks + block, total)


@triton.jit
def draw_kernel(
    logits_ptr, peak_ptr, sum_ptr, uniform_ptr, token_ptr, width, blocks, inverse_temperature,
    PDL: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    wait_for_inputs(PDL)
    peaks = tl.load(peak_ptr + row * blocks + index, mask=index < blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + row * blocks + index, mask=index < blocks, other=0.0)
    peak = tl.max(peaks, axis=0)
    weights = (sums * tl.exp(peaks - peak)).to(tl.float64)
    cumulative = tl.cumsum(weights, axis=0)
    target = tl.load(uniform_ptr + row) * tl.sum(weights, axis=0)
    # Rounding must not choose a block or an id of no weight: the last one with weight is the bound.
    last = tl.max(tl.where(weights > 0.0, index, 0), axis=0)
    block = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), axis=0), last)
    rest = target - tl.sum(tl.where(index < block, weights, 0.0), axis=0)
    place = tl.arange(0, BLOCK)
    column = block * BLOCK + place
    logit = tl.load(logits_ptr + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
    inner = tl.exp(logit * inverse_temperature - peak).to(tl.float64)
    last = tl.max(tl.where(inner > 0.0, place, 0), axis=0)
    chosen = tl.minimum(tl.sum((tl.cumsum(inner, axis=0) <= rest).to(tl.int32), axis=0), last)
    tl.store(token_ptr + row, (block * BLOCK + chosen).to(tl.int64))


def draw(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """logits [rows, V] contiguous, uniform [rows] fp64 in [0, 1) -> ids [rows] int64."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, BLOCK)
    peak, total = logits.new_empty(2, rows, blocks, dtype=torch.float32)
    token = logits.new_empty(rows, dtype=torch.int64)
    inverse = 1.0 / temperature
    # The logits may come from a copy, after which a graph takes no dependent launch.
    block_kernel[(rows, blocks)](logits, peak, total, width, blocks, inverse, BLOCK=BLOCK, num_warps=4)
    draw_kernel[(rows,)](
        logits, peak, total, uniform, token, width, blocks, inverse,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks), **dependent_launch(), num_warps=4,
    )  # fmt: skip
    return token
