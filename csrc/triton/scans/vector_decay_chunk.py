"""Intra-chunk kernels of the vector-decay scan: scores, decays, and their gradients.

A pair (t, s) of a chunk, t > s, belongs to one level: the highest bit in which t and s differ. At level l the chunk
splits into parents of 2^(l+1) rows, t lies in the odd half of one, s in the even half, and the pivot p is the last row
of the even half. The decay from s to t is that from s to p times that from p to t, so with

    x_t = q_t exp(sum of g over p < j <= t) in odd halves,    x_s = k_s exp(sum of g over s < j <= p) in even halves

the scores of all pairs of a level are the entries of X X^T there, and X's gradient is (G + G^T) X with G the scores'.
No exponent is positive, whatever g is: each is a sum of g, computed as a matmul with a matrix of zeros and ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from megalin._triton.scans.vector_decay_gates import load_keys, load_logit, store_gradients

CHUNK = tl.constexpr(64)
LEVELS = tl.constexpr(6)
LOWEST = tl.constexpr(-105.0)
"""Its exp is 0 in fp32: g is clamped to it without changing a result."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_product(ones, x, sums, DTYPE: tl.constexpr, TERMS: tl.constexpr):
    """Computes sums + ones @ x with `ones` a matrix of zeros and ones: x in TERMS terms of bf16, or exactly in fp32."""
    if tl.float32 == DTYPE:
        sums += tl.dot(ones.to(tl.float32), x, input_precision="ieee")
    else:
        for _ in tl.static_range(TERMS):
            term = x.to(tl.bfloat16)
            sums = tl.dot(ones, term, sums)
            x -= term.to(tl.float32)
    return sums


@triton.jit
def load_masks(masks_ptr, index, row, column):
    """Loads two matrices [C, C] of zeros and ones: for a level, the pairs of rows that belong to it, and the tokens
    between each row and its pivot; for index LEVELS, the tokens up to each row, and those after it."""
    at = masks_ptr + index * 2 * CHUNK * CHUNK + row[:, None] * CHUNK + column[None, :]
    return tl.load(at), tl.load(at + CHUNK * CHUNK)


@triton.jit
def document_masks(masks_ptr, row, column, document, DOCUMENTS: tl.constexpr):
    """Zeros and ones [C, C]: the tokens of its document up to each row, and those after it."""
    past, future = load_masks(masks_ptr, LEVELS, row, column)
    if DOCUMENTS:
        same = document[:, None] == document[None, :]
        past, future = tl.where(same, past, 0.0), tl.where(same, future, 0.0)
    return past, future


@triton.jit
def load_rows(ptr, stride, row, channel, mask):
    return tl.load(ptr + row[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def same_document(documents_ptr, first, row, length):
    """Document of each row of the chunk, of the state entering it, and of the state leaving it."""
    document = tl.load(documents_ptr + tl.minimum(first + row, length - 1))
    entering = tl.load(documents_ptr + tl.maximum(first - 1, 0))
    leaving = tl.load(documents_ptr + tl.minimum(first + CHUNK - 1, length - 1))
    return document, entering, leaving


@triton.jit
def chunk_decays(g, masks_ptr, row, column, document, entering, leaving, DTYPE: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Decay from the chunk's start to each row and from each row to its end [C, K], and through it [K]."""
    past, future = document_masks(masks_ptr, row, column, document, DOCUMENTS)
    sums = add_product(past, g, tl.zeros_like(g), DTYPE, 2)
    to_end = add_product(future, g, tl.zeros_like(g), DTYPE, 2)
    through = tl.exp2(tl.sum(tl.where((row == CHUNK - 1)[:, None], sums, 0.0), axis=0))
    from_start, to_end = tl.exp2(sums), tl.exp2(to_end)
    if DOCUMENTS:
        from_start = tl.where((document == entering)[:, None], from_start, 0.0)
        to_end = tl.where((document == leaving)[:, None], to_end, 0.0)
        through = tl.where(entering == leaving, through, 0.0)
    return from_start, to_end, through


@triton.jit
def level_rows(between, odd, q, k, g, DTYPE: tl.constexpr):
    """Decay between each row and its pivot at one level [C, BLOCK_K], and X."""
    decay = tl.exp2(add_product(between, g, tl.zeros_like(g), DTYPE, 2))
    return decay, tl.where(odd, q, k) * decay


@triton.jit(do_not_specialize=["length", "num_chunks"])
def scores_kernel(
    q_ptr, k_ptr, g_ptr, documents_ptr, masks_ptr,  # [B, T, H, K] strided; [B, T] int32; [levels, 2, C, C]
    kind_ptr, q_start_ptr, k_end_ptr, scores_ptr, through_ptr,  # as in Chunks of vector_decay.py
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
    length, num_chunks, heads, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, SOME: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Writes per chunk the scores A, q decayed from its start, k decayed to its end, and the decay through it.

    SOME: only for chunks of kind 0, as vector_decay_mild.py computes the others; likewise below.
    """
    DTYPE: tl.constexpr = q_start_ptr.dtype.element_ty
    chunk = tl.program_id(0) % num_chunks
    batch_head = (tl.program_id(0) // num_chunks).to(tl.int64)
    if SOME and tl.load(kind_ptr + batch_head * num_chunks + chunk) != 0:
        return
    batch, head = batch_head // heads, batch_head % heads
    row, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    first = chunk.to(tl.int64) * CHUNK
    live = first + row < length
    block = batch_head * num_chunks * CHUNK + first
    q_ptr += batch * q_b + head * q_h + first * q_t
    k_ptr += batch * k_b + head * k_h + first * k_t
    g_ptr += batch * g_b + head * g_h + first * g_t
    document, entering, leaving = row, first, first
    if DOCUMENTS:
        documents_ptr += batch * length
        document, entering, leaving = same_document(documents_ptr, first, row, length)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, K, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        mask = live[:, None] & (channel < K)[None, :]
        q = load_rows(q_ptr, q_t, row, channel, mask).to(tl.float32) * scale
        k, g = load_keys(k_ptr, g_ptr, k_t, g_t, row, channel, mask, LOWEST, K, GATES, tl.float32 != DTYPE)
        k = k.to(tl.float32)
        scores += tl.where(row[:, None] == column[None, :], tl.sum(q * k, axis=1)[:, None], 0.0)
        from_start, to_end, through = chunk_decays(
            g, masks_ptr, row, column, document, entering, leaving, DTYPE, DOCUMENTS
        )
        at, wide = row[:, None] * K + channel[None, :], (channel < K)[None, :]
        tl.store(q_start_ptr + block * K + at, (q * from_start).to(DTYPE), mask=wide)
        tl.store(k_end_ptr + block * K + at, (k * to_end).to(DTYPE), mask=wide)
        tl.store(through_ptr + (batch_head * num_chunks + chunk) * K + channel, through, mask=channel < K)
        for level in range(LEVELS):
            pairs, between = load_masks(masks_ptr, level, row, column)
            odd = (((row >> level) & 1) == 1)[:, None]
            _, x = level_rows(between, odd, q, k, g, DTYPE)
            x = x.to(DTYPE)
            found = tl.dot(x, tl.trans(x), input_precision="tf32x3")
            scores += found * pairs.to(tl.float32)
    visible = row[:, None] >= column[None, :]
    if DOCUMENTS:
        visible = visible & (document[:, None] == document[None, :])
    scores = tl.where(visible, scores, 0.0)
    tl.store(scores_ptr + block * CHUNK + row[:, None] * CHUNK + column[None, :], scores.to(DTYPE))


@triton.jit
def products(
    v_ptr, do_ptr, states_ptr, dstates_ptr,  # states entering, and gradients of states leaving: [B, H, N, K, V]
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,  # of the results of scores_kernel
    v_b, v_t, v_h, do_b, do_t, do_h,
    length, num_chunks, heads,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sums over the values: gradients of one chunk's decayed q and k, of its scores (the diagonal separately), and of
    the decay through it."""
    chunk = tl.program_id(0) % num_chunks
    batch_head = (tl.program_id(0) // num_chunks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    row, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    first = chunk.to(tl.int64) * CHUNK
    live = first + row < length
    block = batch_head * num_chunks * CHUNK + first
    channel = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    v_ptr += batch * v_b + head * v_h + first * v_t
    do_ptr += batch * do_b + head * do_h + first * do_t
    states_ptr += (batch_head * num_chunks + chunk) * K * V
    dstates_ptr += (batch_head * num_chunks + chunk) * K * V
    dq_start = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk_end = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    dthrough = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, V, BLOCK_V):
        value = start + tl.arange(0, BLOCK_V)
        mask = live[:, None] & (value < V)[None, :]
        v, do = load_rows(v_ptr, v_t, row, value, mask), load_rows(do_ptr, do_t, row, value, mask)
        inside = (channel < K)[:, None] & (value < V)[None, :]
        state = load_rows(states_ptr, V, channel, value, inside)  # [BLOCK_K, BLOCK_V]
        dstate = load_rows(dstates_ptr, V, channel, value, inside)
        dq_start = tl.dot(do, tl.trans(state), dq_start, input_precision="tf32x3")
        dk_end = tl.dot(v, tl.trans(dstate), dk_end, input_precision="tf32x3")
        dscores = tl.dot(do, tl.trans(v), dscores, input_precision="tf32x3")
        dthrough += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
    at, wide = row[:, None] * K + channel[None, :], (channel < K)[None, :]
    tl.store(dq_start_ptr + block * K + at, dq_start.to(dq_start_ptr.dtype.element_ty), mask=wide)
    tl.store(dk_end_ptr + block * K + at, dk_end.to(dk_end_ptr.dtype.element_ty), mask=wide)
    tl.store(dthrough_ptr + (batch_head * num_chunks + chunk) * K + channel, dthrough, mask=channel < K)
    if tl.program_id(1) == 0:
        itself = tl.sum(tl.where(row[:, None] == column[None, :], dscores, 0.0), axis=1)
        tl.store(dself_ptr + block + row, itself)
        dscores = tl.where(row[:, None] > column[None, :], dscores, 0.0)
        pairs = row[:, None] * CHUNK + column[None, :]
        tl.store(dscores_ptr + block * CHUNK + pairs, dscores.to(dscores_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["length", "num_chunks"])
def products_kernel(
    v_ptr, do_ptr, states_ptr, dstates_ptr,
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
    v_b, v_t, v_h, do_b, do_t, do_h,
    length, num_chunks, heads,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`products` of every chunk."""
    products(
        v_ptr, do_ptr, states_ptr, dstates_ptr,
        dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
        v_b, v_t, v_h, do_b, do_t, do_h,
        length, num_chunks, heads, K, V, BLOCK_K, BLOCK_V,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "num_chunks"])
def gradients_kernel(
    q_ptr, k_ptr, g_ptr, documents_ptr, masks_ptr, kind_ptr, through_ptr,
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
    dq_ptr, dk_ptr, dg_ptr,  # [B, T, H, K] contiguous
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
    length, num_chunks, heads, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, SOME: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and g of one chunk and BLOCK_K channels, from those of the results of scores_kernel."""
    DTYPE: tl.constexpr = dscores_ptr.dtype.element_ty
    chunk = tl.program_id(0) % num_chunks
    batch_head = (tl.program_id(0) // num_chunks).to(tl.int64)
    if SOME and tl.load(kind_ptr + batch_head * num_chunks + chunk) != 0:
        return
    batch, head = batch_head // heads, batch_head % heads
    row, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    first = chunk.to(tl.int64) * CHUNK
    live = first + row < length
    block = batch_head * num_chunks * CHUNK + first
    channel = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask, wide = live[:, None] & (channel < K)[None, :], (channel < K)[None, :]
    q = load_rows(q_ptr + batch * q_b + head * q_h + first * q_t, q_t, row, channel, mask).to(tl.float32) * scale
    k_ptr += batch * k_b + head * k_h + first * k_t
    g_ptr += batch * g_b + head * g_h + first * g_t
    k, g = load_keys(k_ptr, g_ptr, k_t, g_t, row, channel, mask, LOWEST, K, GATES, tl.float32 != DTYPE)
    k = k.to(tl.float32)
    document, entering, leaving = row, first, first
    if DOCUMENTS:
        documents_ptr += batch * length
        document, entering, leaving = same_document(documents_ptr, first, row, length)
    from_start, to_end, _ = chunk_decays(g, masks_ptr, row, column, document, entering, leaving, DTYPE, DOCUMENTS)
    dq = load_rows(dq_start_ptr + block * K, K, row, channel, wide).to(tl.float32) * from_start
    dk = load_rows(dk_end_ptr + block * K, K, row, channel, wide).to(tl.float32) * to_end
    at = (batch_head * num_chunks + chunk) * K + channel
    through = tl.load(through_ptr + at, mask=channel < K, other=0.0)
    dthrough = tl.load(dthrough_ptr + at, mask=channel < K, other=0.0)
    # Gradient of g from the decays to and from the chunk's ends: q's adds to all g up to it, k's to all g after it.
    dsums = q * dq
    dg = tl.zeros_like(dq) + (dthrough * through)[None, :]
    past, future = document_masks(masks_ptr, row, column, document, DOCUMENTS)
    dg = add_product(tl.trans(future), k * dk, dg, DTYPE, 1)

    dscores = tl.load(dscores_ptr + block * CHUNK + row[:, None] * CHUNK + column[None, :])
    if DOCUMENTS:
        dscores = tl.where(document[:, None] == document[None, :], dscores, 0.0)
    dscores += tl.trans(dscores)
    # The pair of a token with itself has no decay.
    own = tl.load(dself_ptr + block + row)[:, None]
    dq += own * k
    dk += own * q
    for level in range(LEVELS):
        pairs, between = load_masks(masks_ptr, level, row, column)
        odd = (((row >> level) & 1) == 1)[:, None]
        decay, x = level_rows(between, odd, q, k, g, DTYPE)
        x = x.to(DTYPE)
        dx = tl.dot(dscores * pairs, x, input_precision="tf32x3")
        dexponent = x.to(tl.float32) * dx
        dx *= decay
        dq += tl.where(odd, dx, 0.0)
        dk += tl.where(odd, 0.0, dx)
        if tl.float32 == DTYPE:
            dg = add_product(tl.trans(between), dexponent, dg, DTYPE, 3)
        else:
            dsums += tl.where(odd, dexponent, -dexponent)
    past, future = document_masks(masks_ptr, row, column, document, DOCUMENTS)
    dg = add_product(tl.trans(past), dsums, dg, DTYPE, 2)

    base = ((batch * length + first) * heads + head) * K
    out = row[:, None] * heads * K + channel[None, :]
    tl.store(dq_ptr + base + out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)
    if GATES:
        logit, bound = load_logit(k_ptr, g_ptr, k_t, row, channel, mask, K)
        store_gradients(dk_ptr + base, dg_ptr, dk, dg, logit, bound, live, channel, out, mask, K)
    else:
        tl.store(dk_ptr + base + out, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dg_ptr + base + out, dg, mask=mask)
