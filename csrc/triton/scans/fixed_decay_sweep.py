"""Kernels of the fixed-decay scan that pass states from chunk to chunk, forward and in reverse.

Blocks, parts and launches: fixed_decay.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chunk_factors(slope, documents_ptr, start, length, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, C: tl.constexpr):
    """Decay of a chunk from its start to each token and from each token to its end [C], the total decay, and each
    token's document; factors are zero across a document's start. `slope` is in log2 units."""
    index = tl.arange(0, C)
    count = tl.minimum(length - start, C)
    from_start = tl.full([C], 1.0, tl.float32)
    to_end = from_start
    through = 1.0
    if DECAY:
        from_start = tl.exp2(-slope * (index + 1).to(tl.float32))
        to_end = tl.exp2(-slope * tl.maximum(count - 1 - index, 0).to(tl.float32))
        through = tl.exp2(-slope * count.to(tl.float32))
    document = index
    if DOCUMENTS:
        document = tl.load(documents_ptr + start + tl.minimum(index, count - 1))
        before = tl.load(documents_ptr + tl.maximum(start - 1, 0))
        last = tl.load(documents_ptr + start + count - 1)
        from_start = tl.where(document == before, from_start, 0.0)
        to_end = tl.where(document == last, to_end, 0.0)
        through = tl.where(before == last, through, 0.0)
    return from_start, to_end, through, document


@triton.jit
def _row_and_column(VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr):
    """Index of batch x head, and first value column; consecutive programs are tiles of one head and share q and k."""
    program, tiles = tl.program_id(0), tl.cdiv(VALUE, BLOCK_VALUE)
    return program // tiles, program % tiles * BLOCK_VALUE


@triton.jit(do_not_specialize=["length", "part_tokens", "skipped"])
def block_state_kernel(
    k_tiles, v_tiles, slopes_ptr, documents_ptr, added_ptr, length, heads, parts, part_tokens, skipped,
    KEY: tl.constexpr, VALUE: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr,
    C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the state update of each part, from part `skipped` on, to `added` [B H, parts, KEY, VALUE]."""
    row, column = _row_and_column(VALUE, BLOCK_VALUE)
    batch, head = row // heads, row % heads
    part = tl.program_id(1) + skipped
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    slope = tl.load(slopes_ptr + head).to(tl.float32) * 1.4426950408889634 if DECAY else 0.0
    first = part * part_tokens
    chunks = tl.cdiv(tl.minimum(part_tokens, length - first), C)
    state = tl.zeros([BLOCK_KEY, BLOCK_VALUE], tl.float32)
    for i in range(0, chunks):
        start = first + (chunks - 1 - i if REVERSE else i) * C
        k = k_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
        v = v_tiles.load([batch, head, start, column]).reshape([C, BLOCK_VALUE])
        if DECAY or DOCUMENTS:
            from_start, to_end, through, _ = _chunk_factors(slope, documents_ptr, start, length, DECAY, DOCUMENTS, C)
            v = v.to(tl.float32) * (from_start if REVERSE else to_end)[:, None]
            state *= through
        state = tl.dot(tl.trans(k), v.to(OPERAND), state, input_precision=PRECISION)
    added_ptr += (row.to(tl.int64) * parts + part) * KEY * VALUE
    key, value = tl.arange(0, BLOCK_KEY), column + tl.arange(0, BLOCK_VALUE)
    offset = key[:, None] * VALUE + value[None, :]
    tl.store(added_ptr + offset, state, mask=(key < KEY)[:, None] & (value < VALUE)[None, :])


@triton.jit(do_not_specialize=["length", "part_tokens"])
def fold_kernel(
    added_ptr, states_ptr, boundary_ptr, slopes_ptr, documents_ptr, length, heads, slots, blocks, part_tokens,
    SIZE: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr, BOUNDARY: tl.constexpr,
    WHOLE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """State updates of PARTS parts per block -> states [rows, slots, SIZE] entering the blocks; `boundary` [rows, SIZE]
    enters the first block (the last if REVERSE). WHOLE: the state [rows, SIZE] after all of them."""
    row, column = _row_and_column(SIZE, BLOCK)
    batch, head, row = row // heads, row % heads, row.to(tl.int64)
    column += tl.arange(0, BLOCK)
    mask = column < SIZE
    added_ptr += row * blocks * PARTS * SIZE
    states_ptr += row * (1 if WHOLE else slots) * SIZE
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    state = tl.zeros([BLOCK], tl.float32)
    if BOUNDARY:
        state = tl.load(boundary_ptr + row * SIZE + column, mask=mask, other=0.0)
    slope = tl.load(slopes_ptr + head).to(tl.float32) * 1.4426950408889634 if DECAY else 0.0
    if not WHOLE:
        tl.store(states_ptr + (blocks - 1 if REVERSE else 0) * SIZE + column, state, mask=mask)
    for i in range(0, (blocks if WHOLE else blocks - 1) * PARTS):
        part = blocks * PARTS - 1 - i if REVERSE else i
        first = tl.minimum(part * part_tokens, length)
        end = tl.minimum(first + part_tokens, length)
        through = 1.0
        if DECAY:
            through = tl.exp2(-slope * (end - first).to(tl.float32))
        if DOCUMENTS:
            before = tl.load(documents_ptr + tl.maximum(first - 1, 0))
            through = tl.where(before == tl.load(documents_ptr + end - 1), through, 0.0)
        added = tl.load(added_ptr + tl.cast(part, tl.int64) * SIZE + column, mask=mask, other=0.0)
        state = state * through + added
        if not WHOLE:
            block = blocks - 1 - (i + 1) // PARTS if REVERSE else (i + 1) // PARTS
            tl.store(states_ptr + block * SIZE + column, state, mask=mask & ((i + 1) % PARTS == 0))
    if WHOLE:
        tl.store(states_ptr + column, state, mask=mask)


@triton.jit(do_not_specialize=["length", "block_tokens"])
def scan_kernel(
    q_tiles, k_tiles, v_tiles, o_tiles, slopes_ptr, documents_ptr, entering_ptr, leaving_ptr,
    length, heads, slots, block_tokens,
    KEY: tl.constexpr, VALUE: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr, ENTERING: tl.constexpr, LEAVING: tl.constexpr,
    C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, VALUE] contiguous from q, k [B, T, H, KEY], v [B, T, H, VALUE] and the states entering each block
    [B H, slots, KEY, VALUE] (TRANSPOSED: [.., VALUE, KEY]); the state after the last block goes to `leaving`."""
    row, column = _row_and_column(VALUE, BLOCK_VALUE)
    batch, head, block = row // heads, row % heads, tl.program_id(1)
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    slope = tl.load(slopes_ptr + head).to(tl.float32) * 1.4426950408889634 if DECAY else 0.0
    index = tl.arange(0, C)
    distance = index[:, None] - index[None, :] if REVERSE else index[None, :] - index[:, None]
    if DECAY:
        decay = tl.where(distance >= 0, tl.exp2(-slope * tl.maximum(distance, 0).to(tl.float32)), 0.0)
    key, value = tl.arange(0, BLOCK_KEY), column + tl.arange(0, BLOCK_VALUE)
    offset = value[:, None] * KEY + key[None, :] if TRANSPOSED else key[None, :] * VALUE + value[:, None]
    inside = (key < KEY)[None, :] & (value < VALUE)[:, None]
    state = tl.zeros([BLOCK_VALUE, BLOCK_KEY], tl.float32)
    if ENTERING:
        entering_ptr += (row.to(tl.int64) * slots + block) * KEY * VALUE
        state = tl.load(entering_ptr + offset, mask=inside, other=0.0)
    first = block * block_tokens
    chunks = tl.cdiv(tl.minimum(block_tokens, length - first), C)
    for i in range(0, chunks):
        start = first + (chunks - 1 - i if REVERSE else i) * C
        q = q_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
        k = k_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
        v = v_tiles.load([batch, head, start, column]).reshape([C, BLOCK_VALUE]).to(OPERAND)
        from_start, to_end, through, document = _chunk_factors(slope, documents_ptr, start, length, DECAY, DOCUMENTS, C)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if DECAY:
            scores *= decay
        else:
            scores = tl.where(distance >= 0, scores, 0.0)
        if DOCUMENTS:
            scores = tl.where(document[:, None] == document[None, :], scores, 0.0)
        o = tl.dot(state.to(OPERAND), tl.trans(q), input_precision=PRECISION)
        weighted = v
        if DECAY or DOCUMENTS:
            o *= (to_end if REVERSE else from_start)[None, :]
            weighted = (v.to(tl.float32) * (from_start if REVERSE else to_end)[:, None]).to(OPERAND)
            state *= through
        o = tl.dot(tl.trans(v), scores.to(OPERAND), o, input_precision=PRECISION)
        state = tl.dot(tl.trans(weighted), k, state, input_precision=PRECISION)
        o_tiles.store([batch, head, start, column], tl.trans(o.to(o_tiles.dtype)).reshape([1, 1, C, BLOCK_VALUE]))
    if LEAVING and block == (0 if REVERSE else tl.num_programs(1) - 1):
        tl.store(leaving_ptr + row.to(tl.int64) * KEY * VALUE + offset, state, mask=inside)
