"""Kernels of the vector-decay scan that pass states from chunk to chunk, forward and in reverse.

    forward   O_n = A_n V_n + Q_n S_n,        S_{n+1} = d_n S_n + K_n^T V_n
    reverse   dV_n = A_n^T dO_n + K_n dS_{n+1},    dS_n = d_n dS_{n+1} + Q_n^T dO_n

with Q, K decayed from the start and to the end of their chunk and d_n the decay through it (vector_decay_chunk.py).
A program sweeps one segment of chunks for one tile of values. Segments exist to fill the GPU: `segment_kernel` computes
the update of each from a zero state, and a sweep first accumulates the segments before its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)


@triton.jit
def place(num_segments, tiles):
    """Tile of values, segment, and batch x head of this program; consecutive programs are tiles of one segment."""
    program = tl.program_id(0)
    tile, rest = program % tiles, program // tiles
    return tile, rest % num_segments, (rest // num_segments).to(tl.int64)


@triton.jit(do_not_specialize=["length", "num_chunks", "num_segments", "segment_chunks"])
def segment_kernel(
    x_ptr, y_ptr, through_ptr, update_ptr, decay_ptr,  # x [B, H, N C, K], y [B, T, H, V] strided
    y_b, y_t, y_h, length, num_chunks, heads, num_segments, segment_chunks,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """State update of each segment [B, H, segments, K, V], and the decay through it [B, H, segments, K]; the last in
    scan direction only if LAST."""
    tile, segment, batch_head = place(num_segments, tl.cdiv(V, BLOCK_V))
    if not LAST and segment == (0 if REVERSE else num_segments - 1):
        return
    batch, head = batch_head // heads, batch_head % heads
    row, channel, value = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    begin = (segment * segment_chunks).to(tl.int64)
    count = tl.minimum(segment_chunks, num_chunks - segment * segment_chunks)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    decay = tl.full([BLOCK_K], 1.0, tl.float32)
    for index in range(0, count):
        chunk = begin + (count - 1 - index if REVERSE else index)
        at = batch_head * num_chunks + chunk
        mask = ((chunk * CHUNK + row) < length)[:, None] & (value < V)[None, :]
        y_at = y_ptr + batch * y_b + head * y_h + chunk * CHUNK * y_t + row[:, None] * y_t + value[None, :]
        y = tl.load(y_at, mask=mask, other=0.0)
        x_at = x_ptr + at * CHUNK * K + row[:, None] * K + channel[None, :]
        x = tl.load(x_at, mask=(channel < K)[None, :], other=0.0)
        through = tl.load(through_ptr + at * K + channel, mask=channel < K, other=0.0)
        state = tl.dot(tl.trans(x), y, state * through[:, None], input_precision="tf32x3")
        decay *= through
    at = batch_head * num_segments + segment
    inside = (channel < K)[:, None] & (value < V)[None, :]
    tl.store(update_ptr + at * K * V + channel[:, None] * V + value[None, :], state, mask=inside)
    if tile == 0:
        tl.store(decay_ptr + at * K + channel, decay, mask=channel < K)


@triton.jit
def fold(state, update_ptr, decay_ptr, at, channel, value, K: tl.constexpr, V: tl.constexpr):
    """State after one more segment."""
    decay = tl.load(decay_ptr + at * K + channel, mask=channel < K, other=0.0)
    inside = (channel < K)[:, None] & (value < V)[None, :]
    update = tl.load(update_ptr + at * K * V + channel[:, None] * V + value[None, :], mask=inside, other=0.0)
    return state * decay[:, None] + update


@triton.jit(do_not_specialize=["num_segments"])
def total_kernel(
    update_ptr, decay_ptr, sum_ptr, product_ptr, num_segments,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """State update of all segments together [B, H, K, V], and the decay through them [B, H, K]."""
    tile, _, batch_head = place(1, tl.cdiv(V, BLOCK_V))
    channel, value = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    decay = tl.full([BLOCK_K], 1.0, tl.float32)
    for index in range(0, num_segments):
        at = batch_head * num_segments + (num_segments - 1 - index if REVERSE else index)
        state = fold(state, update_ptr, decay_ptr, at, channel, value, K, V)
        decay *= tl.load(decay_ptr + at * K + channel, mask=channel < K, other=0.0)
    inside = (channel < K)[:, None] & (value < V)[None, :]
    tl.store(sum_ptr + batch_head * K * V + channel[:, None] * V + value[None, :], state, mask=inside)
    if tile == 0:
        tl.store(product_ptr + batch_head * K + channel, decay, mask=channel < K)


@triton.jit(do_not_specialize=["length", "num_chunks", "num_segments", "segment_chunks"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, scores_ptr, through_ptr, update_ptr, decay_ptr, initial_ptr,
    output_ptr, states_ptr, final_ptr,
    v_b, v_t, v_h, length, num_chunks, heads, num_segments, segment_chunks,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    INITIAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Writes the output [B, T, H, V], the final state and, if KEEP, the state entering each chunk."""
    DTYPE: tl.constexpr = v_ptr.dtype.element_ty
    tile, segment, batch_head = place(num_segments, tl.cdiv(V, BLOCK_V))
    batch, head = batch_head // heads, batch_head % heads
    row, channel, value = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, CHUNK)
    begin = (segment * segment_chunks).to(tl.int64)
    count = tl.minimum(segment_chunks, num_chunks - segment * segment_chunks)
    inside = (channel < K)[:, None] & (value < V)[None, :]
    tile_at = channel[:, None] * V + value[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if INITIAL:
        state = tl.load(initial_ptr + batch_head * K * V + tile_at, mask=inside, other=0.0).to(tl.float32)
    for before in range(0, segment):
        state = fold(state, update_ptr, decay_ptr, batch_head * num_segments + before, channel, value, K, V)
    for index in range(0, count):
        chunk = begin + index
        at = batch_head * num_chunks + chunk
        mask = ((chunk * CHUNK + row) < length)[:, None] & (value < V)[None, :]
        v_at = v_ptr + batch * v_b + head * v_h + chunk * CHUNK * v_t + row[:, None] * v_t + value[None, :]
        v = tl.load(v_at, mask=mask, other=0.0)
        qk_at = row[:, None] * K + channel[None, :]
        q = tl.load(q_ptr + at * CHUNK * K + qk_at, mask=(channel < K)[None, :], other=0.0)
        k = tl.load(k_ptr + at * CHUNK * K + qk_at, mask=(channel < K)[None, :], other=0.0)
        scores = tl.load(scores_ptr + at * CHUNK * CHUNK + row[:, None] * CHUNK + column[None, :])
        through = tl.load(through_ptr + at * K + channel, mask=channel < K, other=0.0)
        low = state.to(DTYPE)
        if KEEP:
            tl.store(states_ptr + at * K * V + tile_at, low, mask=inside)
        output = tl.dot(q, low, input_precision="tf32x3")
        output = tl.dot(scores, v, output, input_precision="tf32x3")
        state = tl.dot(tl.trans(k), v, state * through[:, None], input_precision="tf32x3")
        base = ((batch * length + chunk * CHUNK) * heads + head) * V
        out = row[:, None] * heads * V + value[None, :]
        tl.store(output_ptr + base + out, output.to(DTYPE), mask=mask)
    if segment == num_segments - 1:
        tl.store(final_ptr + batch_head * K * V + tile_at, state, mask=inside)


@triton.jit(do_not_specialize=["length", "num_chunks", "num_segments", "segment_chunks"])
def reverse_kernel(
    q_ptr, k_ptr, do_ptr, scores_ptr, through_ptr, update_ptr, decay_ptr, dfinal_ptr,
    dv_ptr, dstates_ptr, dinitial_ptr,
    do_b, do_t, do_h, length, num_chunks, heads, num_segments, segment_chunks,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Writes dv [B, T, H, V], the gradient of the state leaving each chunk, and that of the initial state."""
    DTYPE: tl.constexpr = do_ptr.dtype.element_ty
    tile, segment, batch_head = place(num_segments, tl.cdiv(V, BLOCK_V))
    batch, head = batch_head // heads, batch_head % heads
    row, channel, value = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, CHUNK)
    begin = (segment * segment_chunks).to(tl.int64)
    count = tl.minimum(segment_chunks, num_chunks - segment * segment_chunks)
    inside = (channel < K)[:, None] & (value < V)[None, :]
    tile_at = channel[:, None] * V + value[None, :]
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FINAL:
        dstate = tl.load(dfinal_ptr + batch_head * K * V + tile_at, mask=inside, other=0.0).to(tl.float32)
    for behind in range(0, num_segments - 1 - segment):
        at = batch_head * num_segments + num_segments - 1 - behind
        dstate = fold(dstate, update_ptr, decay_ptr, at, channel, value, K, V)
    for index in range(0, count):
        chunk = begin + count - 1 - index
        at = batch_head * num_chunks + chunk
        mask = ((chunk * CHUNK + row) < length)[:, None] & (value < V)[None, :]
        do_at = do_ptr + batch * do_b + head * do_h + chunk * CHUNK * do_t + row[:, None] * do_t + value[None, :]
        do = tl.load(do_at, mask=mask, other=0.0)
        qk_at = row[:, None] * K + channel[None, :]
        q = tl.load(q_ptr + at * CHUNK * K + qk_at, mask=(channel < K)[None, :], other=0.0)
        k = tl.load(k_ptr + at * CHUNK * K + qk_at, mask=(channel < K)[None, :], other=0.0)
        scores = tl.load(scores_ptr + at * CHUNK * CHUNK + row[:, None] * CHUNK + column[None, :])
        through = tl.load(through_ptr + at * K + channel, mask=channel < K, other=0.0)
        low = dstate.to(DTYPE)
        tl.store(dstates_ptr + at * K * V + tile_at, low, mask=inside)
        dv = tl.dot(k, low, input_precision="tf32x3")
        dv = tl.dot(tl.trans(scores), do, dv, input_precision="tf32x3")
        dstate = tl.dot(tl.trans(q), do, dstate * through[:, None], input_precision="tf32x3")
        base = ((batch * length + chunk * CHUNK) * heads + head) * V
        out = row[:, None] * heads * V + value[None, :]
        tl.store(dv_ptr + base + out, dv.to(DTYPE), mask=mask)
    if segment == 0:
        tl.store(dinitial_ptr + batch_head * K * V + tile_at, dstate, mask=inside)
