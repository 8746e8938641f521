"""Backward of selective_scan.py, in reverse over the tokens of a segment.

    G_t = do_t q_t^T + e^{dt_{t+1} A} G_{t+1},    W_t = G_t e^{dt_t A} S_{t-1}, element by element,
    dq_t = S_t^T do_t,    dk_t = G_t^T (dt_t v_t),    dv_t = dt_t (G_t k_t),    dA = sum over t of W_t dt_t,
    d dt_t = v_t (G_t k_t) + sum over n of W_t A

The states entering blocks of TOKENS tokens are recomputed first (KIND "keep" of selective_scan.py); a program
recomputes those of ROWS tokens of a block at a time and holds them in registers. Each program sums dq and dk over its
channels, and dA over its tokens; these partial sums are added afterwards, so that equal calls give equal bits.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.scans.selective_scan import (
    LOG2_E,
    ROWS,
    TOKENS,
    Sums,
    load_continues,
    load_rows,
    place,
    scan_of,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["length", "segment_tokens", "segments", "skipped"])
def sum_kernel(
    q_ptr, do_ptr, step_ptr, rates_ptr, documents_ptr, added_ptr, total_ptr,
    q_b, q_t, do_b, do_t, step_b, step_t, length, width, segment_tokens, segments, skipped,
    DOCUMENTS: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The outputs' contribution to the gradient of the state entering each segment, from the `skipped`-th on, and the
    sum of dt."""
    LAST: tl.constexpr = TOKENS - 1
    batch, _, channel, n, at, in_width, in_state, inside = place(length, width, N, BLOCK_D, BLOCK_N)
    segment = (tl.program_id(1) + skipped).to(tl.int64)
    q_ptr += batch * q_b
    do_ptr += batch * do_b
    step_ptr += batch * step_b
    if DOCUMENTS:
        documents_ptr += batch * length
    rates = tl.load(rates_ptr + at, mask=inside, other=0.0) * LOG2_E
    gradient = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    start = segment * segment_tokens
    blocks = tl.cdiv(tl.minimum(start + segment_tokens, length) - start, TOKENS)
    for i in range(0, blocks):
        first = start + (blocks - 1 - i) * TOKENS
        do = load_rows(do_ptr, do_t, first, length, channel, in_width, TOKENS)
        step = load_rows(step_ptr, step_t, first, length, channel, in_width, TOKENS)
        q = load_rows(q_ptr, q_t, first, length, n, in_state, TOKENS)
        continues = load_continues(documents_ptr, first, length, TOKENS, DOCUMENTS)
        for j in tl.static_range(TOKENS):
            gradient += do[LAST - j][:, None] * q[LAST - j][None, :]
            gradient *= tl.exp2(step[LAST - j][:, None] * rates)
            if DOCUMENTS:
                gradient = tl.where(continues[LAST - j], gradient, 0.0)
            total += step[LAST - j]
    at_segment = batch * segments + segment
    tl.store(added_ptr + at_segment * width * N + at, gradient, mask=inside)
    tl.store(total_ptr + at_segment * width + channel, total, mask=in_width)


@triton.jit
def token_states(state, v, step, k, rates, continues, ROWS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """States after each of ROWS tokens, the last first, and `state` before them."""
    states = (state,)
    for r in tl.static_range(ROWS):
        if DOCUMENTS:
            state = tl.where(continues[r], state, 0.0)
        state = tl.exp2(step[r][:, None] * rates) * state + (step[r] * v[r])[:, None] * k[r][None, :]
        states = (state,) + states
    return states


@triton.jit(do_not_specialize=["length", "segment_tokens", "segments", "slots"])
def gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, step_ptr, rates_ptr, documents_ptr,
    kept_ptr, leaving_ptr,  # [B, blocks, D, N], [B, slots, D, N]
    dq_ptr, dk_ptr, dv_ptr, dstep_ptr, drates_ptr, dentering_ptr,
    # [B, channel blocks, T, N] twice, [B, T, D] twice, [B, segments, D, N], [B, D, N]
    q_b, q_t, k_b, k_t, v_b, v_t, do_b, do_t, step_b, step_t, length, width, segment_tokens, segments, slots,
    LEAVING: tl.constexpr, DOCUMENTS: tl.constexpr, N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    LAST: tl.constexpr = ROWS - 1
    GROUPS: tl.constexpr = TOKENS // ROWS
    batch, column_block, channel, n, at, in_width, in_state, inside = place(length, width, N, BLOCK_D, BLOCK_N)
    segment = tl.program_id(1).to(tl.int64)
    size = width.to(tl.int64) * N
    q_ptr += batch * q_b
    k_ptr += batch * k_b
    v_ptr += batch * v_b
    do_ptr += batch * do_b
    step_ptr += batch * step_b
    partial = (batch * tl.cdiv(width, BLOCK_D) + column_block) * length
    if DOCUMENTS:
        documents_ptr += batch * length
    rates = tl.load(rates_ptr + at, mask=inside, other=0.0) * LOG2_E
    gradient = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    if LEAVING:
        gradient = tl.load(leaving_ptr + (batch * slots + segment) * size + at, mask=inside, other=0.0)
    drates = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
    start = segment * segment_tokens
    blocks = tl.cdiv(tl.minimum(start + segment_tokens, length) - start, TOKENS)
    for turn in range(0, blocks):
        first = start + (blocks - 1 - turn) * TOKENS
        block = batch * tl.cdiv(length, TOKENS) + first // TOKENS
        entering = tl.load(kept_ptr + block * size + at, mask=inside, other=0.0)
        for group in tl.static_range(GROUPS):
            # The states of a block do not fit the registers: those of its last group, then those of the one before.
            states = (entering,)
            for earlier in tl.static_range(GROUPS - group):
                here = first + earlier * ROWS
                v = load_rows(v_ptr, v_t, here, length, channel, in_width, ROWS)
                step = load_rows(step_ptr, step_t, here, length, channel, in_width, ROWS)
                k = load_rows(k_ptr, k_t, here, length, n, in_state, ROWS)
                continues = load_continues(documents_ptr, here, length, ROWS, DOCUMENTS)
                states = token_states(states[0], v, step, k, rates, continues, ROWS, DOCUMENTS)
            q = load_rows(q_ptr, q_t, here, length, n, in_state, ROWS)
            do = load_rows(do_ptr, do_t, here, length, channel, in_width, ROWS)
            for i in tl.static_range(ROWS):
                t = here + LAST - i
                live = t < length
                gradient += do[LAST - i][:, None] * q[LAST - i][None, :]
                dq = tl.sum(do[LAST - i][:, None] * states[i], axis=0)
                dk = tl.sum(gradient * (step[LAST - i] * v[LAST - i])[:, None], axis=0)
                tl.store(dq_ptr + (partial + t) * N + n, dq, mask=in_state & live)
                tl.store(dk_ptr + (partial + t) * N + n, dk, mask=in_state & live)
                dadded = tl.sum(gradient * k[LAST - i][None, :], axis=1)
                gradient *= tl.exp2(step[LAST - i][:, None] * rates)
                if DOCUMENTS:
                    gradient = tl.where(continues[LAST - i], gradient, 0.0)
                dlog = gradient * states[i + 1]
                drates += dlog * step[LAST - i][:, None]
                dstep = v[LAST - i] * dadded + tl.sum(dlog * rates, axis=1) * LN_2
                dv = step[LAST - i] * dadded
                out = (batch * length + t) * width + channel
                tl.store(dstep_ptr + out, dstep, mask=in_width & live)
                tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=in_width & live)
    tl.store(drates_ptr + (batch * segments + segment) * size + at, drates, mask=inside)
    if segment == 0:
        tl.store(dentering_ptr + batch * size + at, gradient, mask=inside)


def begin(
    q: Tensor, do: Tensor, step: Tensor, rates: Tensor, documents: Tensor | None, *, total: bool
) -> tuple[Tensor, Sums]:
    """First phase: the outputs' contribution to the gradient of the entering state [B, D, N, 1], empty unless `total`,
    and the input of `finish`."""
    scan = scan_of(do, rates)
    sums = scan.empty_sums(rates, total=total)
    skipped = 0 if total else 1
    if scan.segments > skipped:
        sum_kernel[(scan.programs, scan.segments - skipped)](
            q, do, step, rates, documents, *sums, *q.stride()[:2], *do.stride()[:2], *step.stride()[:2], *scan.sizes,
            skipped, DOCUMENTS=documents is not None, N=scan.state_size, **scan.tile, TOKENS=TOKENS, num_warps=1,
        )  # fmt: skip
    if not total:
        return rates.new_empty(0), sums
    final = scan.fold(sums, rates, documents, None, reverse=True, total=True)
    assert final is not None
    return final, sums


def finish(
    do: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rates: Tensor,
    documents: Tensor | None,
    entering: Tensor | None,
    saved: Tensor,
    sums: Sums,
) -> tuple[Tensor, ...]:
    """Second phase, from the gradient of the leaving state [B, D, N, 1]: dq, dk, dv, dstep, drates, and the gradient of
    the entering state [B, D, N, 1]; `saved` from `selective_scan.finish`."""
    scan = scan_of(v, rates)
    batch, length, width, state_size = scan.batch, scan.length, scan.width, scan.state_size
    leaving = scan.fold(sums, rates, documents, d_leaving, reverse=True, total=False)
    kept = rates.new_empty(batch, triton.cdiv(length, TOKENS), width, state_size)
    states = entering if scan.segments == 1 else saved
    results = (None, None, None, kept)
    scan.forward("keep", None, k, v, step, rates, documents, states, results, scan.segments)
    partial = rates.new_empty(2, batch, scan.programs // batch, length, state_size)
    dv, dstep = v.new_empty(v.shape), rates.new_empty(v.shape)
    drates = rates.new_empty(batch, scan.segments, width, state_size)
    d_entering = rates.new_empty(batch, width, state_size, 1)
    strides = (n for x in (q, k, v, do, step) for n in x.stride()[:2])
    gradient_kernel[(scan.programs, scan.segments)](
        q, k, v, do, step, rates, documents, kept, leaving, *partial, dv, dstep, drates, d_entering, *strides,
        *scan.sizes, scan.segments, LEAVING=leaving is not None, DOCUMENTS=documents is not None, N=state_size,
        **scan.tile, TOKENS=TOKENS, ROWS=ROWS, num_warps=1,
    )  # fmt: skip
    dq, dk = (x.sum(1).to(q.dtype) for x in partial)
    return dq, dk, dv, dstep, drates.sum((0, 1)), d_entering
