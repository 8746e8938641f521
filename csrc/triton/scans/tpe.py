"""TPE's recurrence in each channel c and decay k in blocks of L tokens, its reverse for dx, and the gradients of B and
log lambda.

    S_t = lambda S_t-1 + x_t,  y_t = sum_k B S_t;    R_t = lambda R_t+1 + dy_t,  dx_t = sum_k B R_t
    dB = sum_t dy_t S_t,  dlog lambda = sum_c B sum_t dy_t Q_t,  Q_t = dS_t / dlog lambda = lambda (Q_t-1 + S_t-1)

With S and Q as they enter a block, its tokens i = 0 .. L - 1, and n = i + 1:

    S <- lambda^L S + sum_i lambda^(L-n) x_i        Q <- lambda^L (Q + L S) + sum_i (L-n) lambda^(L-n) x_i
    y_i = sum_k lambda^n (B S) + sum_j taps_j x_i-j             taps_j = sum_k B lambda^j, j = 0 .. i
    dB += S W,  dslope += Q W + S W'                W = sum_i lambda^n dy_i,  W' = sum_i n lambda^n dy_i
    dB += lambda^j lags_j,  dslope += j lambda^j lags_j         lags_j = sum_i dy_i x_i-j

The sums over i and over k with powers of lambda are matmuls, the same powers for all channels. Only y's window and
`lags`, L multiply-adds each a token and channel, and a few operations a state and block run on the fp32 units. A matmul
has bf16 operands: a number is a sum of one to three bf16 terms. Tensor cores truncate their sums, so no state is
accumulated there. lambda^L has two fp32 terms, since its rounding error is the same in every block.

A program has some channels over a segment of tokens; states between segments come from a pass without outputs. The
first segment begins with as many empty tokens as the length lacks. `age` [B, T] uint8 counts tokens since the first one
of a document, in the order of the scan: a token of age n has the n tokens before it in its document. It ends at
STATES_BLOCK, the longest block.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.scans.tpe_blocks import (
    BLOCK,
    STATES_BLOCK,
    DecayPowers,
    DocumentAges,
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

SCAN_CHANNELS = 16
PROGRAMS = 3072
"""Target number of programs of 16 channels, which sets the length of segments, a power of two."""
MIN_SEGMENT = 64
FOLD_BLOCK = 256
TAPS_CHANNELS = 16


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def states_kernel(
    x_ptr, terms_ptr, rounded_ptr, age_ptr, state_ptr, slope_ptr, length, segment, segments, width, decays,
    REVERSE: tl.constexpr, SLOPES: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr, LONGEST: tl.constexpr,
    CHANNELS: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """S (R with `REVERSE`) at the end of each segment from a zero state; with `SLOPES` also Q."""
    tiles = tl.cdiv(decays, DECAYS)
    channel = tl.program_id(0) // tiles * CHANNELS + tl.arange(0, CHANNELS)
    decay = (tl.program_id(0) % tiles * DECAYS + tl.arange(0, DECAYS))[None, :]
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index = tl.arange(0, BLOCK)
    high, middle, low = power(terms_ptr, BLOCK - 1 - index[:, None], decay, decays, LONGEST, TERMS)
    through = tl.load(rounded_ptr + BLOCK * decays + decay, mask=decay < decays, other=0.0)
    rest = tl.load(rounded_ptr + (LONGEST + 2 + BLOCK) * decays + decay, mask=decay < decays, other=0.0)
    if SLOPES:
        slopes_ptr = terms_ptr + 3 * (LONGEST + 1) * decays
        more_high, more_middle, more_low = power(slopes_ptr, BLOCK - 1 - index[:, None], decay, decays, LONGEST, TERMS)
    state = tl.zeros([CHANNELS, DECAYS], tl.float32)
    slope = tl.zeros([CHANNELS, DECAYS], tl.float32)
    begin = part * segment + length - segments * segment
    begin += tl.maximum(0, -begin) // BLOCK * BLOCK
    rows = (channel < width)[:, None]
    token = begin + index
    x = tl.load(
        tokens(x_ptr, token, batch, channel, length, width, REVERSE), mask=rows & (token >= 0)[None, :], other=0.0
    )
    for start in range(begin, part * segment + length - (segments - 1) * segment, BLOCK):
        token = start + BLOCK + index
        inside = rows & (token < length)[None, :]
        following = tl.load(tokens(x_ptr, token, batch, channel, length, width, REVERSE), mask=inside, other=0.0)
        age = tl.load(age_ptr + batch * length + start + BLOCK - 1)
        x = tl.where((BLOCK - 1 - index <= age)[None, :], x, tl.zeros_like(x))
        if age < BLOCK:
            state = tl.zeros_like(state)
            slope = tl.zeros_like(slope)
        if SLOPES:
            slope += BLOCK * state
            slope = advance(slope, through, rest, matmul(x, more_high, more_middle, more_low, TERMS))
        state = advance(state, through, rest, matmul(x, high, middle, low, TERMS))
        x = following
    place = ((batch * segments + part) * width + channel[:, None]) * decays + decay
    tl.store(state_ptr + place, state, mask=rows & (decay < decays))
    if SLOPES:
        tl.store(slope_ptr + place, slope, mask=rows & (decay < decays))


@triton.jit(do_not_specialize=["segment", "segments"])
def fold_kernel(
    rounded_ptr, broken_ptr, state_ptr, slope_ptr, segment, segments, size, decays,
    SLOPES: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Replaces each segment's final state from zero by the state entering it; `broken`: a document starts in it."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1).to(tl.int64)
    mask = place < size
    through = tl.load(rounded_ptr + (LONGEST + 1) * decays + place % decays, mask=mask, other=0.0)
    rest = tl.load(rounded_ptr + (2 * LONGEST + 3) * decays + place % decays, mask=mask, other=0.0)
    state = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    for part in range(segments):
        target = (batch * segments + part) * size + place
        broken = tl.load(broken_ptr + batch * segments + part) != 0
        added = tl.load(state_ptr + target, mask=mask, other=0.0)
        tl.store(state_ptr + target, state, mask=mask)
        if SLOPES:
            more = tl.load(slope_ptr + target, mask=mask, other=0.0)
            tl.store(slope_ptr + target, slope, mask=mask)
            slope = tl.where(broken, more, advance(slope + segment * state, through, rest, more))
        state = tl.where(broken, added, advance(state, through, rest, added))


@triton.jit
def taps_kernel(
    coefficients_ptr, rounded_ptr, taps_ptr, width, decays,
    LONGEST: tl.constexpr, CHANNELS: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """One tap of some channels, summed over decays in fp64."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    lag, index = tl.program_id(1), tl.arange(0, DECAYS)
    rounded = tl.load(rounded_ptr + lag * decays + index, mask=index < decays, other=0.0).to(tl.float64)
    rounded += tl.load(rounded_ptr + (LONGEST + 2 + lag) * decays + index, mask=index < decays, other=0.0)
    mask = (channel < width)[:, None] & (index < decays)[None, :]
    place = channel[:, None].to(tl.int64) * decays + index[None, :]
    coefficients = tl.load(coefficients_ptr + place, mask=mask, other=0.0).to(tl.float64)
    taps = tl.sum(coefficients * rounded[None, :], axis=1).to(tl.float32)
    tl.store(taps_ptr + lag * width + channel, taps, mask=channel < width)


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def scan_kernel(
    x_ptr, coefficients_ptr, terms_ptr, rounded_ptr, taps_ptr, age_ptr, entering_ptr, y_ptr, leaving_ptr,
    length, segment, segments, width, decays,
    REVERSE: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr, LONGEST: tl.constexpr,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Computes y from x and S; with `REVERSE` dx from dy and R. `leaving` [B, D, E]: state after the last segment.

    Each of GROUPS warps has GROUP decays of all channels; y is the sum over warps.
    """
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index = tl.arange(0, BLOCK)
    group = tl.arange(0, GROUPS)[:, None, None] * GROUP
    decay = group + tl.arange(0, GROUP)[None, None, :]
    upright = group + tl.arange(0, GROUP)[None, :, None]
    high, middle, low = power(terms_ptr, BLOCK - 1 - index[None, :, None], decay, decays, LONGEST, TERMS)
    seen_high, seen_middle, seen_low = power(terms_ptr, 1 + index[None, None, :], upright, decays, LONGEST, TERMS)
    through = tl.load(rounded_ptr + BLOCK * decays + decay, mask=decay < decays, other=0.0)
    rest = tl.load(rounded_ptr + (LONGEST + 2 + BLOCK) * decays + decay, mask=decay < decays, other=0.0)
    place = channel[None, :, None].to(tl.int64) * decays + decay
    mask = (channel < width)[None, :, None] & (decay < decays)
    coefficients = tl.load(coefficients_ptr + place, mask=mask, other=0.0)
    state = tl.zeros([GROUPS, CHANNELS, GROUP], tl.float32)
    if segments > 1:
        state = tl.load(entering_ptr + (batch * segments + part) * width * decays + place, mask=mask, other=0.0)
    begin = part * segment + length - segments * segment
    begin += tl.maximum(0, -begin) // BLOCK * BLOCK
    rows = (channel < width)[:, None]
    token = begin + index
    x = tl.load(
        tokens(x_ptr, token, batch, channel, length, width, REVERSE), mask=rows & (token >= 0)[None, :], other=0.0
    )
    for start in range(begin, part * segment + length - (segments - 1) * segment, BLOCK):
        token = start + index
        own = tokens(x_ptr, token, batch, channel, length, width, REVERSE)
        result = tokens(y_ptr, token, batch, channel, length, width, REVERSE)
        following = tl.load(
            tokens(x_ptr, token + BLOCK, batch, channel, length, width, REVERSE),
            mask=rows & (token + BLOCK < length)[None, :], other=0.0
        )  # fmt: skip
        age = tl.load(age_ptr + batch * length + token, mask=token >= 0, other=0).to(tl.int32)
        age = tl.where(token >= 0, age, -1)
        last = tl.load(age_ptr + batch * length + start + BLOCK - 1)

        product = state * coefficients
        carried = tl.sum(matmul(product, seen_high, seen_middle, seen_low, TERMS), axis=0)
        y = tl.where((age > index)[None, :], carried, 0.0)
        reach = tl.minimum(age, index)
        for lag in tl.static_range(BLOCK):
            tap = tl.load(taps_ptr + lag * width + channel, mask=channel < width, other=0.0)
            back = own - lag * width
            if REVERSE:
                back = own + lag * width
            y += tap[:, None] * tl.load(back, mask=rows & (lag <= reach)[None, :], other=0.0).to(tl.float32)
        tl.store(result, y, mask=rows & (token >= 0)[None, :])

        x = tl.where((BLOCK - 1 - index <= last)[None, :], x, tl.zeros_like(x))
        if last < BLOCK:
            state = tl.zeros_like(state)
        repeated = tl.broadcast_to(x[None, :, :], [GROUPS, CHANNELS, BLOCK])
        state = advance(state, through, rest, matmul(repeated, high, middle, low, TERMS))
        x = following
    if part == segments - 1:
        tl.store(leaving_ptr + batch * width * decays + place, state, mask=mask)


def forward(x: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor, y: Tensor) -> Tensor:
    """Writes y [B, T, D] from x [B, T, D], B [D, E] and log lambda [E], fp32, and starts uint8; returns S [B, D, E]
    after the last token. All contiguous."""
    return _scan(x, coefficients, log_decay, starts, y, reverse=False)


def backward_input(dy: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor, dx: Tensor) -> None:
    """Writes dx [B, T, D] from dy; the rest as in `forward`."""
    _scan(dy, coefficients, log_decay, starts, dx, reverse=True)


def _scan(x: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor, y: Tensor, *, reverse: bool) -> Tensor:
    (batch, length, width), decays = x.shape, len(log_decay)
    segment, segments = segments_of(x)
    powers, ages = powers_of(log_decay, segment), ages_of(starts, segment, segments, reverse=reverse)
    entering, _ = entering_states(x, powers, ages, reverse=reverse, slopes=False)
    taps = log_decay.new_empty(BLOCK, width)
    taps_kernel[(triton.cdiv(width, TAPS_CHANNELS), BLOCK)](
        coefficients, powers.rounded, taps, width, decays,
        LONGEST=STATES_BLOCK, CHANNELS=TAPS_CHANNELS, DECAYS=triton.next_power_of_2(decays), num_warps=4
    )  # fmt: skip
    leaving = log_decay.new_empty(batch, width, decays)
    group = tile_of(decays, tiles_of(x).group)
    groups = triton.next_power_of_2(triton.cdiv(decays, group))
    scan_kernel[(triton.cdiv(width, SCAN_CHANNELS), segments, batch)](
        x, coefficients, *powers, taps, ages.age, entering, y, leaving, length, segment, segments, width, decays,
        REVERSE=reverse, TERMS=terms_of(x), BLOCK=BLOCK, LONGEST=STATES_BLOCK, CHANNELS=SCAN_CHANNELS, GROUPS=groups,
        GROUP=group, num_warps=groups
    )  # fmt: skip
    return leaving


def entering_states(
    x: Tensor, powers: DecayPowers, ages: DocumentAges, *, reverse: bool, slopes: bool
) -> tuple[Tensor, Tensor]:
    """S or R, and Q, [B, segments, D, E], entering the segments; nothing is computed for one segment."""
    (batch, length, width), decays = x.shape, powers.rounded.shape[-1]
    segment, segments = segments_of(x)
    if segments == 1:
        return powers.rounded, powers.rounded
    state = powers.rounded.new_empty(batch, segments, width, decays)
    slope = state.new_empty(state.shape) if slopes else state
    channels, largest, warps = tiles_of(x).states
    tile = tile_of(decays, largest)
    states_kernel[(triton.cdiv(width, channels) * triton.cdiv(decays, tile), segments, batch)](
        x, *powers, ages.age, state, slope, length, segment, segments, width, decays,
        REVERSE=reverse, SLOPES=slopes, TERMS=terms_of(x), BLOCK=STATES_BLOCK, LONGEST=STATES_BLOCK, CHANNELS=channels,
        DECAYS=tile, num_warps=warps
    )  # fmt: skip
    size = width * decays
    fold_kernel[(triton.cdiv(size, FOLD_BLOCK), batch)](
        powers.rounded, ages.broken, state, slope, segment, segments, size, decays,
        SLOPES=slopes, LONGEST=STATES_BLOCK, BLOCK=FOLD_BLOCK, num_warps=2
    )  # fmt: skip
    return state, slope


def segments_of(x: Tensor) -> tuple[int, int]:
    """Tokens per segment, and number of segments."""
    batch, length, width = x.shape
    tokens_each = batch * length * triton.cdiv(width, 16) // PROGRAMS
    segment = max(MIN_SEGMENT, triton.next_power_of_2(max(1, tokens_each)))
    return segment, triton.cdiv(length, segment)
