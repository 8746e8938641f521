"""Gradients of TPE's B and log lambda: states times the output's gradient, in blocks as in tpe.py."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.scans.tpe import entering_states, segments_of
from megalin._triton.scans.tpe_blocks import (
    BLOCK,
    STATES_BLOCK,
    advance,
    ages_of,
    matmul,
    power,
    powers_of,
    terms_of,
    tile_of,
    tiles_of,
    tokens,
)

LAG_CHANNELS = 8
LAG_BLOCKS = 16
LAG_WARPS = 2


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def gradient_kernel(
    x_ptr, dy_ptr, terms_ptr, rounded_ptr, age_ptr, state_ptr, slope_ptr, dcoefficients_ptr, dslope_ptr, leaving_ptr,
    length, segment, segments, width, decays,
    TERMS: tl.constexpr, BLOCK: tl.constexpr, LONGEST: tl.constexpr, CHANNELS: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """Sums dy_t S_t and dy_t Q_t over each segment, without x of t's own block; `leaving` [B, D, E] is Q at the end."""
    tiles = tl.cdiv(decays, DECAYS)
    channel = tl.program_id(0) // tiles * CHANNELS + tl.arange(0, CHANNELS)
    decay = (tl.program_id(0) % tiles * DECAYS + tl.arange(0, DECAYS))[None, :]
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index = tl.arange(0, BLOCK)
    slopes_ptr = terms_ptr + 3 * (LONGEST + 1) * decays
    to_end, from_start = BLOCK - 1 - index[:, None], 1 + index[:, None]
    high, middle, low = power(terms_ptr, to_end, decay, decays, LONGEST, TERMS)
    more_high, more_middle, more_low = power(slopes_ptr, to_end, decay, decays, LONGEST, TERMS)
    seen_high, seen_middle, seen_low = power(terms_ptr, from_start, decay, decays, LONGEST, TERMS)
    grown_high, grown_middle, grown_low = power(slopes_ptr, from_start, decay, decays, LONGEST, TERMS)
    through = tl.load(rounded_ptr + BLOCK * decays + decay, mask=decay < decays, other=0.0)
    rest = tl.load(rounded_ptr + (LONGEST + 2 + BLOCK) * decays + decay, mask=decay < decays, other=0.0)
    rows = (channel < width)[:, None]
    mask = rows & (decay < decays)
    own = channel[:, None].to(tl.int64) * decays + decay
    place = (batch * segments + part) * width * decays + own
    state = tl.zeros([CHANNELS, DECAYS], tl.float32)
    slope = tl.zeros([CHANNELS, DECAYS], tl.float32)
    dcoefficients = tl.zeros([CHANNELS, DECAYS], tl.float32)
    dslope = tl.zeros([CHANNELS, DECAYS], tl.float32)
    if segments > 1:
        state = tl.load(state_ptr + place, mask=mask, other=0.0)
        slope = tl.load(slope_ptr + place, mask=mask, other=0.0)
    begin = part * segment + length - segments * segment
    begin += tl.maximum(0, -begin) // BLOCK * BLOCK
    token = begin + index
    inside = rows & (token >= 0)[None, :]
    x = tl.load(tokens(x_ptr, token, batch, channel, length, width, False), mask=inside, other=0.0)
    dy = tl.load(tokens(dy_ptr, token, batch, channel, length, width, False), mask=inside, other=0.0)
    for start in range(begin, part * segment + length - (segments - 1) * segment, BLOCK):
        token = start + BLOCK + index
        inside = rows & (token < length)[None, :]
        following = tl.load(tokens(x_ptr, token, batch, channel, length, width, False), mask=inside, other=0.0)
        dfollowing = tl.load(tokens(dy_ptr, token, batch, channel, length, width, False), mask=inside, other=0.0)
        token = start + index
        age = tl.load(age_ptr + batch * length + token, mask=token >= 0, other=0).to(tl.int32)
        age = tl.where(token >= 0, age, -1)
        last = tl.load(age_ptr + batch * length + start + BLOCK - 1)

        dy = tl.where((age > index)[None, :], dy, tl.zeros_like(dy))
        weight = matmul(dy, seen_high, seen_middle, seen_low, TERMS)
        dcoefficients += weight * state
        dslope += weight * slope
        dslope += state * matmul(dy, grown_high, grown_middle, grown_low, TERMS)

        x = tl.where((BLOCK - 1 - index <= last)[None, :], x, tl.zeros_like(x))
        if last < BLOCK:
            state = tl.zeros_like(state)
            slope = tl.zeros_like(slope)
        slope += BLOCK * state
        slope = advance(slope, through, rest, matmul(x, more_high, more_middle, more_low, TERMS))
        state = advance(state, through, rest, matmul(x, high, middle, low, TERMS))
        x = following
        dy = dfollowing
    tl.store(dcoefficients_ptr + place, dcoefficients, mask=mask)
    tl.store(dslope_ptr + place, dslope, mask=mask)
    if part == segments - 1:
        tl.store(leaving_ptr + batch * width * decays + own, slope, mask=mask)


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def lags_kernel(
    x_ptr, dy_ptr, age_ptr, lags_ptr, length, segment, segments, width,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Sums dy_t x_t-j over each segment, j = 0 .. BLOCK - 1, inside a block and a document.

    A channel has a matrix [BLOCK, BLOCK] of sums over blocks, a matmul; the sums of lags are those of its diagonals.
    Documents of a block differ in the index of their first token in it, and have a matmul each.
    """
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[:, None, None]
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, block = tl.arange(0, BLOCK), tl.arange(0, BLOCKS) * BLOCK
    inside = channel < width
    total = tl.zeros([CHANNELS, BLOCK, BLOCK], tl.float32)
    begin = part * segment + length - segments * segment
    begin += tl.maximum(0, -begin) // BLOCK * BLOCK
    end = part * segment + length - (segments - 1) * segment
    for start in range(begin, end, BLOCK * BLOCKS):
        token = start + block[:, None] + index[None, :]
        mask = (token >= 0) & (token < end)
        age = tl.load(age_ptr + batch * length + token, mask=mask, other=BLOCK).to(tl.int32)
        first = tl.maximum(index[None, :] - age, 0)
        place = ((batch * length + token) * width)[None, :, :] + channel
        x = tl.load(x_ptr + place, mask=inside & mask[None, :, :], other=0.0)
        turned = start + block[None, :] + index[:, None]
        mask = (turned >= 0) & (turned < end)
        age = tl.load(age_ptr + batch * length + turned, mask=mask, other=BLOCK).to(tl.int32)
        own = tl.maximum(index[:, None] - age, 0)
        place = ((batch * length + turned) * width)[None, :, :] + channel
        dy = tl.load(dy_ptr + place, mask=inside & mask[None, :, :], other=0.0)
        for document in range(tl.max(first) + 1):
            left = tl.where((own == document)[None, :, :], dy, tl.zeros_like(dy))
            right = tl.where((first == document)[None, :, :], x, tl.zeros_like(x))
            if x.dtype == dy.dtype and x.dtype != tl.float32:
                total += tl.dot(left, right)
            else:
                total += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="bf16x6")
    distance = index[:, None] - index[None, :]
    target = ((batch * segments + part) * BLOCK) * width + channel
    for lag in tl.static_range(BLOCK):
        found = tl.where((distance == lag)[None, :, :], total, 0.0)
        found = tl.sum(tl.sum(found, axis=2, keep_dims=True), axis=1, keep_dims=True)
        tl.store(lags_ptr + target + lag * width, found, mask=inside)


def backward_parameters(dy: Tensor, x: Tensor, log_decay: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sums of dy_t S_t and dy_t Q_t over the batch [D, E] fp64, and Q [B, D, E] after the last token."""
    (batch, length, width), decays = x.shape, len(log_decay)
    segment, segments = segments_of(x)
    powers, ages = powers_of(log_decay, segment), ages_of(starts, segment, segments, reverse=False)
    state, slope = entering_states(x, powers, ages, reverse=False, slopes=True)
    parts = [log_decay.new_empty(batch * segments, width, decays) for _ in range(2)]
    leaving = log_decay.new_empty(batch, width, decays)
    channels, largest, warps = tiles_of(x).gradient
    tile = tile_of(decays, largest)
    gradient_kernel[(triton.cdiv(width, channels) * triton.cdiv(decays, tile), segments, batch)](
        x, dy, *powers, ages.age, state, slope, *parts, leaving, length, segment, segments, width, decays,
        TERMS=terms_of(x), BLOCK=BLOCK, LONGEST=STATES_BLOCK, CHANNELS=channels, DECAYS=tile,
        num_warps=warps
    )  # fmt: skip
    lags = log_decay.new_empty(batch * segments, BLOCK, width)
    lags_kernel[(triton.cdiv(width, LAG_CHANNELS), segments, batch)](
        x, dy, ages.age, lags, length, segment, segments, width, BLOCK=BLOCK, BLOCKS=LAG_BLOCKS,
        CHANNELS=LAG_CHANNELS, num_warps=LAG_WARPS
    )  # fmt: skip
    own = powers.rounded[:, :BLOCK].double().sum(0)
    index = torch.arange(BLOCK, device=x.device)[:, None]
    lagged = lags.sum(0, dtype=torch.float64).mT
    dcoefficients, dslope = (part.sum(0, dtype=torch.float64) for part in parts)
    return dcoefficients + lagged @ own, dslope + lagged @ (index * own), leaving
