"""TPE's recurrence in each channel c and decay k, its reverse for dx, and the gradients of B and log lambda.

    S_t = lambda S_t-1 + x_t,  y_t = sum_k B S_t;    R_t = lambda R_t+1 + dy_t,  dx_t = sum_k B R_t
    dB = sum_t dy_t S_t,  dlog lambda = sum_c B sum_t dy_t Q_t,  Q_t = dS_t / dlog lambda = lambda (Q_t-1 + S_t-1)

S does not include B, so a step of a state is two multiply-adds, one into S and one into y. A warp has all decays of a
few channels, a quarter or an eighth of them per thread, over a segment of tokens; states between segments come from a
pass without outputs. S, R and Q are reset at a document's first token, marked in `starts` [B, T + 1], last entry 0.
Operations: a multiply-add per state and token in the first pass, two in the second, eight in the backward.

The rounding error of lambda in fp32 is the same at every token, and n times as large in lambda^n: every four tokens,
states with a memory longer than four tokens are corrected by a factor for four roundings.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import triton
import triton.language as tl

CHANNELS = 8
GRADIENT_CHANNELS = 4
PROGRAMS = 12288
"""Target number of programs of eight channels, which sets the length of segments, a power of two."""
MENDED = 4
"""Tokens between two corrections of the rounding of lambda."""
MIN_SEGMENT = 64
FOLD_BLOCK = 256


@triton.jit
def _place(decay_ptr, width, decays, CHANNELS: tl.constexpr, DECAYS: tl.constexpr):
    """Channels, offsets [DECAYS, CHANNELS] in a [D, E] table with their mask, lambda (0 outside) and its correction."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    index = tl.arange(0, DECAYS)
    mask = (index < decays)[:, None] & (channel < width)[None, :]
    decay = tl.load(decay_ptr + index, mask=index < decays, other=0.0)
    rest = tl.load(decay_ptr + decays + index, mask=index < decays, other=0.0)
    return channel, channel[None, :].to(tl.int64) * decays + index[:, None], mask, decay[:, None], rest[:, None]


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def states_kernel(
    x_ptr, decay_ptr, starts_ptr, state_ptr, slope_ptr, length, segment, segments, width, decays,
    REVERSE: tl.constexpr, SLOPES: tl.constexpr, MENDED: tl.constexpr, CHANNELS: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """S (R with `REVERSE`) at the end of each segment from a zero state; with `SLOPES` also Q."""
    channel, table, mask, decay, rest = _place(decay_ptr, width, decays, CHANNELS, DECAYS)
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = part * segment
    count = tl.minimum(length - begin, segment)
    first = begin
    step = 1
    if REVERSE:
        first = begin + count - 1
        step = -1
    row = x_ptr + (batch * length + first) * width + channel
    flag = starts_ptr + batch * (length + 1) + first + REVERSE
    state = tl.zeros([DECAYS, CHANNELS], tl.float32)
    slope = tl.zeros([DECAYS, CHANNELS], tl.float32)
    x = tl.load(row, mask=channel < width, other=0.0)
    for i in range(count):
        row += step * width
        following = tl.load(row, mask=(channel < width) & (i + 1 < count), other=0.0)
        if tl.load(flag) != 0:
            state = tl.zeros_like(state)
            slope = tl.zeros_like(slope)
        flag += step
        if SLOPES:
            slope = (slope + state) * decay
        state = state * decay + x.to(tl.float32)[None, :]
        if i % MENDED == MENDED - 1:
            state += state * rest
            if SLOPES:
                slope += slope * rest
        x = following
    place = (batch * segments + part) * width * decays + table
    tl.store(state_ptr + place, state, mask=mask)
    if SLOPES:
        tl.store(slope_ptr + place, slope, mask=mask)


@triton.jit(do_not_specialize=["segment", "segments"])
def fold_kernel(
    decay_ptr, broken_ptr, state_ptr, slope_ptr, segment, segments, size, decays,
    REVERSE: tl.constexpr, SLOPES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Replaces each segment's final state from zero by the state entering it; `broken`: a document starts in it."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1).to(tl.int64)
    mask = place < size
    through = tl.load(decay_ptr + 2 * decays + place % decays, mask=mask, other=0.0)
    state = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    for i in range(segments):
        part = batch * segments + (segments - 1 - i if REVERSE else i)
        kept = tl.where(tl.load(broken_ptr + part) != 0, 0.0, through)
        added = tl.load(state_ptr + part * size + place, mask=mask, other=0.0)
        tl.store(state_ptr + part * size + place, state, mask=mask)
        if SLOPES:
            more = tl.load(slope_ptr + part * size + place, mask=mask, other=0.0)
            tl.store(slope_ptr + part * size + place, slope, mask=mask)
            slope = kept * (slope + segment * state) + more
        state = kept * state + added


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def scan_kernel(
    x_ptr, coefficients_ptr, decay_ptr, starts_ptr, entering_ptr, y_ptr, leaving_ptr,
    length, segment, segments, width, decays,
    REVERSE: tl.constexpr, MENDED: tl.constexpr, CHANNELS: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """Computes y from x and S; with `REVERSE` dx from dy and R. `leaving` [B, D, E]: state after the last segment."""
    channel, table, mask, decay, rest = _place(decay_ptr, width, decays, CHANNELS, DECAYS)
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = part * segment
    count = tl.minimum(length - begin, segment)
    first = begin
    step = 1
    if REVERSE:
        first = begin + count - 1
        step = -1
    row = (batch * length + first) * width + channel
    flag = starts_ptr + batch * (length + 1) + first + REVERSE
    coefficients = tl.load(coefficients_ptr + table, mask=mask, other=0.0)
    state = tl.zeros([DECAYS, CHANNELS], tl.float32)
    if segments > 1:
        place = (batch * segments + part) * width * decays + table
        state = tl.load(entering_ptr + place, mask=mask, other=0.0)
    x = tl.load(x_ptr + row, mask=channel < width, other=0.0)
    for i in range(count):
        following = tl.load(x_ptr + row + step * width, mask=(channel < width) & (i + 1 < count), other=0.0)
        if tl.load(flag) != 0:
            state = tl.zeros_like(state)
        flag += step
        state = state * decay + x.to(tl.float32)[None, :]
        tl.store(y_ptr + row, tl.sum(state * coefficients, axis=0), mask=channel < width)
        row += step * width
        if i % MENDED == MENDED - 1:
            state += state * rest
        x = following
    if part == segments - 1:
        tl.store(leaving_ptr + batch * width * decays + table, state, mask=mask)


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def gradient_kernel(
    x_ptr, dy_ptr, decay_ptr, starts_ptr, state_ptr, slope_ptr, dcoefficients_ptr, dslope_ptr, leaving_ptr,
    length, segment, segments, width, decays, MENDED: tl.constexpr, CHANNELS: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """Sums dy_t S_t and dy_t Q_t over each segment; `leaving` [B, D, E] is Q after the last one."""
    channel, table, mask, decay, rest = _place(decay_ptr, width, decays, CHANNELS, DECAYS)
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = part * segment
    count = tl.minimum(length - begin, segment)
    row = (batch * length + begin) * width + channel
    flag = starts_ptr + batch * (length + 1) + begin
    place = (batch * segments + part) * width * decays + table
    state = tl.zeros([DECAYS, CHANNELS], tl.float32)
    slope = tl.zeros([DECAYS, CHANNELS], tl.float32)
    dcoefficients = tl.zeros([DECAYS, CHANNELS], tl.float32)
    dslope = tl.zeros([DECAYS, CHANNELS], tl.float32)
    if segments > 1:
        state = tl.load(state_ptr + place, mask=mask, other=0.0)
        slope = tl.load(slope_ptr + place, mask=mask, other=0.0)
    x = tl.load(x_ptr + row, mask=channel < width, other=0.0)
    dy = tl.load(dy_ptr + row, mask=channel < width, other=0.0)
    for i in range(count):
        row += width
        following = tl.load(x_ptr + row, mask=(channel < width) & (i + 1 < count), other=0.0)
        dfollowing = tl.load(dy_ptr + row, mask=(channel < width) & (i + 1 < count), other=0.0)
        if tl.load(flag + i) != 0:
            state = tl.zeros_like(state)
            slope = tl.zeros_like(slope)
        slope = (slope + state) * decay
        state = state * decay + x.to(tl.float32)[None, :]
        dcoefficients += dy.to(tl.float32)[None, :] * state
        dslope += dy.to(tl.float32)[None, :] * slope
        if i % MENDED == MENDED - 1:
            state += state * rest
            slope += slope * rest
        x = following
        dy = dfollowing
    tl.store(dcoefficients_ptr + place, dcoefficients, mask=mask)
    tl.store(dslope_ptr + place, dslope, mask=mask)
    if part == segments - 1:
        tl.store(leaving_ptr + batch * width * decays + table, slope, mask=mask)


def forward(x: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor, y: Tensor) -> Tensor:
    """Writes y [B, T, D] from x [B, T, D], B [D, E] and log lambda [E], fp32, and starts uint8; returns S [B, D, E]
    after the last token. All contiguous."""
    return _scan(x, coefficients, log_decay, starts, y, reverse=False)


def backward_input(dy: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor, dx: Tensor) -> None:
    """Writes dx [B, T, D] from dy; the rest as in `forward`."""
    _scan(dy, coefficients, log_decay, starts, dx, reverse=True)


def backward_parameters(dy: Tensor, x: Tensor, log_decay: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sums of dy_t S_t and dy_t Q_t over the batch [D, E] fp64, and Q [B, D, E] after the last token."""
    (batch, length, width), decays = x.shape, len(log_decay)
    segment, segments = _segments(x)
    table = _decays(log_decay, segment)
    state, slope = _entering(x, table, starts, reverse=False, slopes=True)
    parts = [log_decay.new_empty(batch * segments, width, decays) for _ in range(2)]
    leaving = log_decay.new_empty(batch, width, decays)
    gradient_kernel[(triton.cdiv(width, GRADIENT_CHANNELS), segments, batch)](
        x, dy, table, starts, state, slope, *parts, leaving, length, segment, segments, width, decays,
        MENDED=MENDED, CHANNELS=GRADIENT_CHANNELS, DECAYS=triton.next_power_of_2(decays), num_warps=1
    )  # fmt: skip
    return parts[0].sum(0, dtype=torch.float64), parts[1].sum(0, dtype=torch.float64), leaving


def _scan(x: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor, y: Tensor, *, reverse: bool) -> Tensor:
    (batch, length, width), decays = x.shape, len(log_decay)
    segment, segments = _segments(x)
    table = _decays(log_decay, segment)
    entering, _ = _entering(x, table, starts, reverse=reverse, slopes=False)
    leaving = log_decay.new_empty(batch, width, decays)
    scan_kernel[(triton.cdiv(width, CHANNELS), segments, batch)](
        x, coefficients, table, starts, entering, y, leaving, length, segment, segments, width, decays,
        REVERSE=reverse, MENDED=MENDED, CHANNELS=CHANNELS, DECAYS=triton.next_power_of_2(decays), num_warps=1
    )  # fmt: skip
    return leaving


def _segments(x: Tensor) -> tuple[int, int]:
    """Tokens per segment, and number of segments."""
    batch, length, width = x.shape
    tokens = batch * length * triton.cdiv(width, CHANNELS) // PROGRAMS
    segment = max(MIN_SEGMENT, triton.next_power_of_2(max(1, tokens)))
    return segment, triton.cdiv(length, segment)


def _decays(log_decay: Tensor, segment: int) -> Tensor:
    """Table [3, E] fp32: lambda, its relative correction, and lambda to the power of the segment's length."""
    exponent = log_decay.double()
    exact = exponent.exp()
    rounded = exact.float()
    rest = torch.where(rounded > 1.0 - 1.0 / MENDED, MENDED * (exact / rounded - 1.0), 0.0)
    return torch.stack([rounded, rest.float(), (segment * exponent).exp().float()])


def _entering(x: Tensor, table: Tensor, starts: Tensor, *, reverse: bool, slopes: bool) -> tuple[Tensor, Tensor]:
    """S or R, and Q, [B, segments, D, E], entering the segments; nothing is computed for one segment."""
    (batch, length, width), decays = x.shape, table.shape[1]
    segment, segments = _segments(x)
    if segments == 1:
        return table, table
    state = table.new_empty(batch, segments, width, decays)
    slope = state.new_empty(state.shape) if slopes else table
    channels = GRADIENT_CHANNELS if slopes else CHANNELS
    states_kernel[(triton.cdiv(width, channels), segments, batch)](
        x, table, starts, state, slope, length, segment, segments, width, decays,
        REVERSE=reverse, SLOPES=slopes, MENDED=MENDED, CHANNELS=channels, DECAYS=triton.next_power_of_2(decays),
        num_warps=1
    )  # fmt: skip
    flags = starts[:, 1:] if reverse else starts[:, :-1]
    broken = functional.pad(flags, (0, segments * segment - length)).unflatten(1, (segments, segment)).amax(-1)
    size = width * decays
    fold_kernel[(triton.cdiv(size, FOLD_BLOCK), batch)](
        table, broken, state, slope, segment, segments, size, decays,
        REVERSE=reverse, SLOPES=slopes, BLOCK=FOLD_BLOCK, num_warps=2
    )  # fmt: skip
    return state, slope
