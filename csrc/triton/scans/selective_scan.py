"""Selective scan of Mamba-1, a decay a channel and state, with states in registers.

    S_t[d, n] = e^{dt_t[d] A[d, n]} S_{t-1}[d, n] + dt_t[d] v_t[d] k_t[n],    o_t[d] = sum over n of q_t[n] S_t[d, n]

A program of one warp loops over the tokens of a segment with the state of its channels in registers; a sequence is cut
into as many segments as fill the GPU. The states entering segments are computed first: what the tokens of each segment
add to zero (KIND "sum"), accumulated over the segments (fold_kernel). selective_scan_gradient.py is the backward.

Bytes: v, dt and o once, and v and dt once more for "sum", which leaves
out the last segment where nothing is exchanged. Arithmetic: N exponentials a token and channel bound the time.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
TOKENS = 8
"""Tokens a block: the backward recomputes and stores the state entering each."""
ROWS = 4
"""Tokens whose loads precede their arithmetic, where more would take registers that other programs need."""
PROGRAMS = 2112
"""Programs that fill the GPU: sixteen warps on each of 132 SMs."""
MIN_SEGMENT = 64
"""Tokens of the shortest segment of a longer sequence."""
TILE = 256
"""Elements of a program's state."""


@triton.jit
def place(length, width, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Batch, block of channels, channels, offsets of a state [D, N], and masks of channels, states and both."""
    blocks = tl.cdiv(width, BLOCK_D)
    block = tl.program_id(0) % blocks
    channel, n = block * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    inside = (channel < width)[:, None] & (n < N)[None, :]
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    return batch, block, channel, n, channel[:, None] * N + n[None, :], channel < width, n < N, inside


@triton.jit
def load_rows(x_ptr, x_t, first, length, column, inside, TOKENS: tl.constexpr):
    """Rows of the tokens from `first`, zero past the last."""
    rows = ()
    for r in tl.static_range(TOKENS):
        x = tl.load(x_ptr + (first + r) * x_t + column, mask=inside & (first + r < length), other=0.0)
        rows = rows + (x.to(tl.float32),)
    return rows


@triton.jit
def load_continues(documents_ptr, first, length, TOKENS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Whether each token from `first` is of the document of the token before it; the first token of all always is."""
    continues = ()
    for r in tl.static_range(TOKENS):
        same = first >= 0
        if DOCUMENTS:
            t = tl.minimum(first + r, length - 1)
            same = tl.load(documents_ptr + t) == tl.load(documents_ptr + tl.maximum(t - 1, 0))
            same = same | (first + r >= length)
        continues = continues + (same,)
    return continues


@triton.jit(do_not_specialize=["length", "segment_tokens", "segments", "slots"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, step_ptr, rates_ptr, documents_ptr,
    entering_ptr,  # [B, slots, D, N]
    o_ptr, state_ptr, total_ptr, kept_ptr,  # [B, T, D]; [B, segments or 1, D, N]; [B, segments, D]; [B, blocks, D, N]
    q_b, q_t, k_b, k_t, v_b, v_t, step_b, step_t, length, width, segment_tokens, segments, slots,
    KIND: tl.constexpr, ENTERING: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """KIND "sum": the state and the sum of dt of each segment, from zero. "scan": o, and the last state. "keep": the
    states entering blocks of TOKENS tokens. The last two start from the states entering segments."""
    batch, _, channel, n, at, in_width, in_state, inside = place(length, width, N, BLOCK_D, BLOCK_N)
    segment = tl.program_id(1).to(tl.int64)
    size = width.to(tl.int64) * N
    k_ptr += batch * k_b
    v_ptr += batch * v_b
    step_ptr += batch * step_b
    if KIND == "scan":
        q_ptr += batch * q_b
        o_ptr += batch * length * width
    if DOCUMENTS:
        documents_ptr += batch * length
    rates = tl.load(rates_ptr + at, mask=inside, other=0.0) * LOG2_E
    state = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    if ENTERING:
        state = tl.load(entering_ptr + (batch * slots + segment) * size + at, mask=inside, other=0.0)
    total = tl.zeros([BLOCK_D], tl.float32)
    start = segment * segment_tokens
    for first in range(start, tl.minimum(start + segment_tokens, length), ROWS):
        if KIND == "keep":
            block = batch * tl.cdiv(length, TOKENS) + first // TOKENS
            tl.store(kept_ptr + block * size + at, state, mask=inside)
        v = load_rows(v_ptr, v_t, first, length, channel, in_width, ROWS)
        step = load_rows(step_ptr, step_t, first, length, channel, in_width, ROWS)
        k = load_rows(k_ptr, k_t, first, length, n, in_state, ROWS)
        q = k
        if KIND == "scan":
            q = load_rows(q_ptr, q_t, first, length, n, in_state, ROWS)
        continues = load_continues(documents_ptr, first, length, ROWS, DOCUMENTS)
        for r in tl.static_range(ROWS):
            if DOCUMENTS:
                state = tl.where(continues[r], state, 0.0)
            state = tl.exp2(step[r][:, None] * rates) * state + (step[r] * v[r])[:, None] * k[r][None, :]
            total += step[r]
            if KIND == "scan":
                o = tl.sum(state * q[r][None, :], axis=1)
                mask = in_width & (first + r < length)
                tl.store(o_ptr + (first + r) * width + channel, o.to(o_ptr.dtype.element_ty), mask=mask)
    if KIND == "sum":
        tl.store(state_ptr + (batch * segments + segment) * size + at, state, mask=inside)
        tl.store(total_ptr + (batch * segments + segment) * width + channel, total, mask=in_width)
    if KIND == "scan" and segment == segments - 1:
        tl.store(state_ptr + batch * size + at, state, mask=inside)


@triton.jit(do_not_specialize=["length", "segment_tokens", "segments", "count"])
def fold_kernel(
    added_ptr, total_ptr, rates_ptr, documents_ptr,  # [B, segments, D, N], [B, segments, D], [D, N], [B, T]
    boundary_ptr, states_ptr, final_ptr,  # [B, D, N], [B, segments, D, N], [B, D, N]
    length, width, segment_tokens, segments, count,
    REVERSE: tl.constexpr, BOUNDARY: tl.constexpr, STATES: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """States entering segments if STATES, else the state after `count` segments, from the sums of segments and
    `boundary`, which enters the first one, or the last if REVERSE, which goes backwards."""
    batch, _, channel, _, at, in_width, _, inside = place(length, width, N, BLOCK_D, BLOCK_N)
    size = width.to(tl.int64) * N
    if DOCUMENTS:
        documents_ptr += batch * length
    rates = tl.load(rates_ptr + at, mask=inside, other=0.0) * LOG2_E
    state = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    if BOUNDARY:
        state = tl.load(boundary_ptr + batch * size + at, mask=inside, other=0.0)
    for i in range(0, count):
        segment = segments - 1 - i if REVERSE else i
        place_of_segment = batch * segments + segment
        if STATES:
            tl.store(states_ptr + place_of_segment * size + at, state, mask=inside)
        if DOCUMENTS:
            first = segment * segment_tokens
            last = tl.minimum(first + segment_tokens, length) - 1
            before = tl.load(documents_ptr + tl.maximum(first - 1, 0))
            state = tl.where(tl.load(documents_ptr + last) == before, state, 0.0)
        total = tl.load(total_ptr + place_of_segment * width + channel, mask=in_width, other=0.0)
        added = tl.load(added_ptr + place_of_segment * size + at, mask=inside, other=0.0)
        state = tl.exp2(total[:, None] * rates) * state + added
    if STATES:
        segment = 0 if REVERSE else segments - 1
        tl.store(states_ptr + (batch * segments + segment) * size + at, state, mask=inside)
    else:
        tl.store(final_ptr + batch * size + at, state, mask=inside)


class Sums(NamedTuple):
    """Results of a first phase, of each segment; empty for one segment where nothing is exchanged."""

    added: Tensor
    """State, or gradient of a state, that its tokens add to zero: [B, segments, D, N] fp32."""
    total: Tensor
    """The sum of dt: [B, segments, D] fp32."""


class SelectiveScan(NamedTuple):
    """Cut of a scan of v [B, T, D] with N states a channel, and its launches."""

    batch: int
    length: int
    width: int
    state_size: int
    segments: int
    segment_tokens: int

    @property
    def tile(self) -> dict[str, int]:
        return tile_of(self.state_size)

    @property
    def programs(self) -> int:
        return self.batch * triton.cdiv(self.width, self.tile["BLOCK_D"])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.length, self.width, self.segment_tokens, self.segments

    def empty_sums(self, like: Tensor, *, total: bool) -> Sums:
        """Uninitialised Sums; `total`: of one segment too."""
        if self.segments == 1 and not total:
            return Sums(like.new_empty(0), like.new_empty(0))
        shape = (self.batch, self.segments, self.width)
        return Sums(like.new_empty(*shape, self.state_size), like.new_empty(shape))

    def fold(
        self,
        sums: Sums,
        rates: Tensor,
        documents: Tensor | None,
        boundary: Tensor | None,
        *,
        reverse: bool,
        total: bool,
    ) -> Tensor | None:
        """States entering segments [B, segments, D, N]; if `total`, the state after all segments [B, D, N, 1]. For one
        segment without `total`: `boundary`."""
        if self.segments == 1 and not total:
            return boundary
        shape = (self.batch, self.width, self.state_size)
        states = None if total else torch.empty_like(sums.added)
        final = rates.new_empty(*shape, 1) if total else None
        fold_kernel[(self.programs,)](
            *sums, rates, documents, boundary, states, final, *self.sizes, self.segments - (not total),
            REVERSE=reverse, BOUNDARY=boundary is not None, STATES=not total, DOCUMENTS=documents is not None,
            N=self.state_size, **self.tile, num_warps=1,
        )  # fmt: skip
        return final if total else states

    def forward(
        self,
        kind: str,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        step: Tensor,
        rates: Tensor,
        documents: Tensor | None,
        entering: Tensor | None,
        results: tuple[Tensor | None, ...],
        segments: int,
    ) -> None:
        """Launches forward_kernel over the first `segments` segments; `results` are o, state, total and kept."""
        forward_kernel[(self.programs, segments)](
            q, k, v, step, rates, documents, entering, *results,
            *(0, 0) if q is None else q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *step.stride()[:2],
            *self.sizes, self.segments, KIND=kind, ENTERING=entering is not None, DOCUMENTS=documents is not None,
            N=self.state_size, **self.tile, TOKENS=TOKENS, ROWS=_rows(kind), num_warps=1,
        )  # fmt: skip


def tile_of(state_size: int) -> dict[str, int]:
    """Channels and states of a program."""
    states = triton.next_power_of_2(state_size)
    return {"BLOCK_D": max(1, TILE // states), "BLOCK_N": states}


def _rows(kind: str) -> int:
    """Tokens loaded at once by forward_kernel; "keep" needs a whole block."""
    return ROWS if kind == "scan" else TOKENS


def _segments(programs: int, length: int) -> int:
    """Number of segments that fill the GPU."""
    return max(1, min(triton.cdiv(PROGRAMS, programs), length // MIN_SEGMENT))


def scan_of(v: Tensor, rates: Tensor) -> SelectiveScan:
    """The cut of a scan of v [B, T, D] with rates [D, N]."""
    (batch, length, width), state_size = v.shape, rates.shape[1]
    programs = batch * triton.cdiv(width, tile_of(state_size)["BLOCK_D"])
    tokens = triton.cdiv(triton.cdiv(length, _segments(programs, length)), TOKENS) * TOKENS
    return SelectiveScan(batch, length, width, state_size, triton.cdiv(length, tokens), tokens)


def begin(
    k: Tensor, v: Tensor, step: Tensor, rates: Tensor, documents: Tensor | None, *, total: bool
) -> tuple[Tensor, Sums]:
    """First phase, from k [B, T, N], v and step [B, T, D], rates [D, N] fp32 and documents [B, T], contiguous in their
    last dimension: the final state from zero [B, D, N, 1], empty unless `total`, and the input of `finish`."""
    scan = scan_of(v, rates)
    sums = scan.empty_sums(rates, total=total)
    count = scan.segments - (not total)
    if count:
        results = (None, *sums, None)
        scan.forward("sum", None, k, v, step, rates, documents, None, results, count)
    if not total:
        return rates.new_empty(0), sums
    final = scan.fold(sums, rates, documents, None, reverse=False, total=True)
    assert final is not None
    return final, sums


def finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rates: Tensor,
    documents: Tensor | None,
    entering: Tensor | None,
    sums: Sums,
) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase, from entering [B, D, N, 1] fp32: o [B, T, D] like v, the final state [B, D, N, 1], and the states
    entering segments, of `saved_shape`."""
    scan = scan_of(v, rates)
    states = scan.fold(sums, rates, documents, entering, reverse=False, total=False)
    o = v.new_empty(v.shape)
    leaving = rates.new_empty(scan.batch, scan.width, scan.state_size, 1)
    results = (o, leaving, None, None)
    scan.forward("scan", q, k, v, step, rates, documents, states, results, scan.segments)
    saved = states if states is not None and scan.segments > 1 else rates.new_empty(saved_shape(v, rates))
    return o, leaving, saved


def saved_shape(v: Tensor, rates: Tensor) -> tuple[int, ...]:
    """Shape of the states saved for the backward, [B, segments, D, N]; segments is 0 for one."""
    scan = scan_of(v, rates)
    return scan.batch, scan.segments if scan.segments > 1 else 0, scan.width, scan.state_size
