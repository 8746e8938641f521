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
    age_of,
    exact_powers,
    matmul,
    power,
    powers_of,
    terms_of,
    tile_of,
    tokens,
)

GRADIENT_TILE = (16, 32)
GRADIENT_WARPS = 1
LAG_CHANNELS = 64
LAG_WARPS = 1


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
    rest = tl.load(rounded_ptr + (LONGEST + 1 + BLOCK) * decays + decay, mask=decay < decays, other=0.0)
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
        age = tl.load(age_ptr + batch * length + token, mask=token >= 0, other=-1)
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
        slope = slope * through + (slope * rest + matmul(x, more_high, more_middle, more_low, TERMS))
        state = state * through + (state * rest + matmul(x, high, middle, low, TERMS))
        x = following
        dy = dfollowing
    tl.store(dcoefficients_ptr + place, dcoefficients, mask=mask)
    tl.store(dslope_ptr + place, dslope, mask=mask)
    if part == segments - 1:
        tl.store(leaving_ptr + batch * width * decays + own, slope, mask=mask)


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def lags_kernel(
    x_ptr, dy_ptr, age_ptr, lags_ptr, length, segment, segments, width, BLOCK: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Sums dy_t x_t-j over each segment, j = 0 .. BLOCK - 1, inside a block and a document."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    lag = tl.arange(0, BLOCK)
    inside = channel < width
    total = tl.zeros([BLOCK, CHANNELS], tl.float32)
    begin = part * segment + length - segments * segment
    begin += tl.maximum(0, -begin) // BLOCK * BLOCK
    for start in range(begin, part * segment + length - (segments - 1) * segment, BLOCK):
        for i in tl.static_range(BLOCK):
            age = tl.load(age_ptr + batch * length + start + i, mask=start + i >= 0, other=-1)
            reach = tl.minimum(age, i)
            row = (batch * length + start + i) * width + channel
            dy = tl.load(dy_ptr + row, mask=inside & (reach >= 0), other=0.0).to(tl.float32)
            mask = (lag <= reach)[:, None] & inside[None, :]
            x = tl.load(x_ptr + row[None, :] - lag[:, None] * width, mask=mask, other=0.0)
            total += dy[None, :] * x.to(tl.float32)
    place = ((batch * segments + part) * BLOCK + lag[:, None]) * width + channel[None, :]
    tl.store(lags_ptr + place, total, mask=inside[None, :])


def backward_parameters(dy: Tensor, x: Tensor, log_decay: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sums of dy_t S_t and dy_t Q_t over the batch [D, E] fp64, and Q [B, D, E] after the last token."""
    (batch, length, width), decays = x.shape, len(log_decay)
    segment, segments = segments_of(x)
    powers, age = powers_of(log_decay), age_of(starts[:, :-1])
    state, slope = entering_states(x, log_decay, powers, age, reverse=False, slopes=True)
    parts = [log_decay.new_empty(batch * segments, width, decays) for _ in range(2)]
    leaving = log_decay.new_empty(batch, width, decays)
    channels, tile = GRADIENT_TILE[0], tile_of(decays, GRADIENT_TILE[1])
    gradient_kernel[(triton.cdiv(width, channels) * triton.cdiv(decays, tile), segments, batch)](
        x, dy, *powers, age, state, slope, *parts, leaving, length, segment, segments, width, decays,
        TERMS=terms_of(x), BLOCK=BLOCK, LONGEST=STATES_BLOCK, CHANNELS=channels, DECAYS=tile, num_warps=GRADIENT_WARPS
    )  # fmt: skip
    lags = log_decay.new_empty(batch * segments, BLOCK, width)
    lags_kernel[(triton.cdiv(width, LAG_CHANNELS), segments, batch)](
        x, dy, age, lags, length, segment, segments, width, BLOCK=BLOCK, CHANNELS=LAG_CHANNELS, num_warps=LAG_WARPS
    )
    index, own = exact_powers(log_decay, BLOCK)
    lagged = lags.sum(0, dtype=torch.float64).mT
    dcoefficients, dslope = (part.sum(0, dtype=torch.float64) for part in parts)
    return dcoefficients + lagged @ own, dslope + lagged @ (index * own), leaving
