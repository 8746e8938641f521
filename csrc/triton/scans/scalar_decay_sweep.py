"""Kernels of the scalar-decay scan that pass states from chunk to chunk, forward and in reverse.

    O_n = (Q_n S_n) * e^b + ((Q_n K_n^T) * D_n) V_n,    S_{n+1} = d_n S_n + K_n^T (V_n * w_n)

with D_n the decays between the tokens of a chunk, e^b from its start, w_n to its end and d_n through it
(scalar_decay_chunk.py). Blocks, parts and launches: scalar_decay.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from megalin._triton.scans.scalar_decay_chunk import pair_scores


@triton.jit
def _row_and_column(VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr):
    """Index of batch x head, and first value column."""
    program, tiles = tl.program_id(0), tl.cdiv(VALUE, BLOCK_VALUE)
    return program // tiles, program % tiles * BLOCK_VALUE


@triton.jit(do_not_specialize=["length", "chunks", "part_chunks", "skipped"])
def state_kernel(
    k_tiles, v_tiles, weight_ptr, through_ptr, entering_ptr, state_tiles, added_ptr, passed_ptr,
    heads, group, chunks, parts, part_chunks, skipped,
    KEY: tl.constexpr, VALUE: tl.constexpr, REVERSE: tl.constexpr, ENTERING: tl.constexpr, KEPT: tl.constexpr,
    RATIO: tl.constexpr, C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    STAGES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States over a part's chunks of RATIO tiles of C tokens; `weight` is the decay to a chunk's end (REVERSE, with
    RATIO 1: from its start). KEPT: the states entering chunks go to `state_tiles` [B H chunks, VALUE, KEY], from those
    entering parts [B H, parts, KEY, VALUE]. Else the part's state update goes to `added` [B H, parts, KEY, VALUE], its
    decay to `passed` [B H, parts], with RATIO 1."""
    row, column = _row_and_column(VALUE, BLOCK_VALUE)
    batch, head, row = row // heads, row % heads, row.to(tl.int64)
    part = tl.program_id(1) + skipped
    key, value = tl.arange(0, BLOCK_KEY), column + tl.arange(0, BLOCK_VALUE)
    offset = (row * parts + part) * KEY * VALUE + key[None, :] * VALUE + value[:, None]
    inside = (key < KEY)[None, :] & (value < VALUE)[:, None]
    state = tl.zeros([BLOCK_VALUE, BLOCK_KEY], tl.float32)
    if ENTERING:
        state = tl.load(entering_ptr + offset, mask=inside, other=0.0)
    first, passed = part * part_chunks, 1.0
    count = tl.minimum(part_chunks, chunks - first)
    for i in tl.range(0, count * RATIO, num_stages=STAGES):
        tile = (first + count) * RATIO - 1 - i if REVERSE else first * RATIO + i
        chunk = tile // RATIO
        if KEPT and tile % RATIO == 0:
            kept = state.to(OPERAND).reshape([1, BLOCK_VALUE, BLOCK_KEY])
            state_tiles.store([(row * chunks + chunk).to(tl.int32), column, 0], kept)
        k = k_tiles.load([batch, head // group, tile * C, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
        v = v_tiles.load([batch, head, tile * C, column]).reshape([C, BLOCK_VALUE]).to(tl.float32)
        weight = tl.load(weight_ptr + (row * chunks * RATIO + tile) * C + tl.arange(0, C))
        through = tl.load(through_ptr + row * chunks + chunk)
        if RATIO > 1:
            through = tl.where(tile % RATIO == 0, through, 1.0)
        weighted = (v * weight[:, None]).to(OPERAND)
        state = tl.dot(tl.trans(weighted), k, state * through, input_precision=PRECISION)
        passed *= through
    if not KEPT:
        tl.store(added_ptr + offset, state, mask=inside)
        tl.store(passed_ptr + row * parts + part, passed)


@triton.jit
def fold_kernel(
    added_ptr, passed_ptr, boundary_ptr, states_ptr, slots, blocks,
    SIZE: tl.constexpr, REVERSE: tl.constexpr, BOUNDARY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """State updates of PARTS parts per block -> states [rows, slots, SIZE] entering the blocks; `boundary` [rows, SIZE]
    enters the first block (the last if REVERSE)."""
    row, column = _row_and_column(SIZE, BLOCK)
    row, column = row.to(tl.int64), column + tl.arange(0, BLOCK)
    mask = column < SIZE
    added_ptr += row * blocks * PARTS * SIZE
    passed_ptr += row * blocks * PARTS
    states_ptr += row * slots * SIZE
    state = tl.zeros([BLOCK], tl.float32)
    if BOUNDARY:
        state = tl.load(boundary_ptr + row * SIZE + column, mask=mask, other=0.0)
    tl.store(states_ptr + (blocks - 1 if REVERSE else 0) * SIZE + column, state, mask=mask)
    for i in range(0, (blocks - 1) * PARTS):
        part = blocks * PARTS - 1 - i if REVERSE else i
        added = tl.load(added_ptr + part * SIZE + column, mask=mask, other=0.0)
        state = state * tl.load(passed_ptr + part) + added
        block = blocks - 1 - (i + 1) // PARTS if REVERSE else (i + 1) // PARTS
        tl.store(states_ptr + block * SIZE + column, state, mask=mask & ((i + 1) % PARTS == 0))


@triton.jit(do_not_specialize=["parts"])
def total_kernel(
    added_ptr, passed_ptr, sum_ptr, product_ptr, parts, SIZE: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """State update of all parts together [rows, SIZE], and the decay through them [rows]."""
    row, column = _row_and_column(SIZE, BLOCK)
    row, column, first = row.to(tl.int64), column + tl.arange(0, BLOCK), column
    mask = column < SIZE
    state, product = tl.zeros([BLOCK], tl.float32), 1.0
    for i in range(0, parts):
        part = row * parts + (parts - 1 - i if REVERSE else i)
        passed = tl.load(passed_ptr + part)
        state = state * passed + tl.load(added_ptr + part * SIZE + column, mask=mask, other=0.0)
        product *= passed
    tl.store(sum_ptr + row * SIZE + column, state, mask=mask)
    if first == 0:
        tl.store(product_ptr + row, product)


@triton.jit(do_not_specialize=["length", "chunks", "block_chunks"])
def scan_kernel(
    q_tiles, k_tiles, v_tiles, o_tiles, sums_ptr, from_start_ptr, to_end_ptr, through_ptr, documents_ptr,
    entering_ptr, state_tiles, leaving_ptr, length, heads, group, chunks, slots, block_chunks,
    KEY: tl.constexpr, VALUE: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr, ENTERING: tl.constexpr,
    KEPT: tl.constexpr, RATIO: tl.constexpr, C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    STAGES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o from q, k [B, T, H / group, KEY], v [B, T, H, VALUE] and the states entering each block [B H, slots, KEY,
    VALUE]; the state after the last block goes to `leaving`. REVERSE: from the end, with `from_start` and `to_end`
    swapped by the caller. KEPT, with REVERSE: the states entering groups of RATIO chunks go to `state_tiles`
    [B H cdiv(chunks, RATIO), VALUE, KEY]."""
    row, column = _row_and_column(VALUE, BLOCK_VALUE)
    batch, head, block, row = row // heads, row % heads, tl.program_id(1), row.to(tl.int64)
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    key, value = tl.arange(0, BLOCK_KEY), column + tl.arange(0, BLOCK_VALUE)
    offset = key[None, :] * VALUE + value[:, None]
    inside = (key < KEY)[None, :] & (value < VALUE)[:, None]
    state = tl.zeros([BLOCK_VALUE, BLOCK_KEY], tl.float32)
    if ENTERING:
        state = tl.load(entering_ptr + (row * slots + block) * KEY * VALUE + offset, mask=inside, other=0.0)
    first = block * block_chunks
    count = tl.minimum(block_chunks, chunks - first)
    for i in tl.range(0, count, num_stages=STAGES):
        chunk = first + (count - 1 - i if REVERSE else i)
        start, place = chunk * C, row * chunks + chunk
        if KEPT and (chunk % RATIO == RATIO - 1 or chunk == chunks - 1):
            kept = state.to(OPERAND).reshape([1, BLOCK_VALUE, BLOCK_KEY])
            state_tiles.store([(row * tl.cdiv(chunks, RATIO) + chunk // RATIO).to(tl.int32), column, 0], kept)
        q = q_tiles.load([batch, head // group, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
        k = k_tiles.load([batch, head // group, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
        v = v_tiles.load([batch, head, start, column]).reshape([C, BLOCK_VALUE]).to(OPERAND)
        from_start = tl.load(from_start_ptr + place * C + tl.arange(0, C))
        to_end = tl.load(to_end_ptr + place * C + tl.arange(0, C))
        through = tl.load(through_ptr + place)
        sums = sums_ptr + place * C
        scores = pair_scores(q, k, sums, documents_ptr, length, start, DOCUMENTS, REVERSE, C, PRECISION)
        o = tl.dot(state.to(OPERAND), tl.trans(q), input_precision=PRECISION) * from_start[None, :]
        o = tl.dot(tl.trans(v), scores.to(OPERAND), o, input_precision=PRECISION)
        weighted = (v.to(tl.float32) * to_end[:, None]).to(OPERAND)
        state = tl.dot(tl.trans(weighted), k, state * through, input_precision=PRECISION)
        o_tiles.store([batch, head, start, column], tl.trans(o.to(o_tiles.dtype)).reshape([1, 1, C, BLOCK_VALUE]))
    if block == (0 if REVERSE else tl.num_programs(1) - 1):
        tl.store(leaving_ptr + row * KEY * VALUE + offset, state, mask=inside)
