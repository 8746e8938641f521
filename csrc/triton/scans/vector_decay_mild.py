"""vector_decay_chunk.py for chunks with mild decays: one matmul in place of one per level.

If no channel's g sums to less than -LIMIT over a chunk, decays from the middle m of that sum stay in range:

    A = tril(X_q X_k^T),  x_q,t = q_t exp(b_t - m),  x_k,s = k_s exp(m - b_s),  b_t = sum of g up to t,  m = b_C / 2

Entries above the diagonal may overflow; they are masked, never multiplied. A chunk with a document's start inside is
never mild: the computation of its scores would depend on another document's decays.
"""

from __future__ import annotations

import triton
import triton.language as tl
from megalin._triton.scans.vector_decay_chunk import (
    CHUNK,
    LOG2_E,
    LOWEST,
    add_product,
    document_masks,
    load_rows,
    same_document,
)
from megalin._triton.scans.vector_decay_gates import (
    as_result,
    gate_key,
    load_keys,
    load_logit,
    store_gradients,
)

LIMIT = tl.constexpr(140.0)
"""exp(LIMIT / 2) is 2.5e30: its products with gradients and values of any sane size stay finite."""


@triton.jit
def middle_decays(g, past, row, DTYPE: tl.constexpr, TENSOR_MEMORY: tl.constexpr):
    """Decays [C, K] of q and k from and to the middle, the remaining decays from the start and to the end [K], the
    decay through the chunk [K], and 1 if all channels are mild. TENSOR_MEMORY: no result of a matmul is reduced to one
    number (dispatch/chips.py)."""
    sums = add_product(past, g, tl.zeros_like(g), DTYPE, 2)
    total = tl.sum(tl.where((row == CHUNK - 1)[:, None], sums, 0.0), axis=0)
    if TENSOR_MEMORY:
        mild = tl.sum(g, axis=0) >= -LIMIT * LOG2_E
    else:
        mild = total >= -LIMIT * LOG2_E
    # In other channels, the start and the end take the place of the middle: their scores are not used.
    start, end = tl.where(mild, 0.5 * total, 0.0), tl.where(mild, 0.5 * total, total)
    of_q = tl.exp2(tl.minimum(sums - start[None, :], 0.5 * LIMIT * LOG2_E))
    of_k = tl.exp2(tl.minimum(end[None, :] - sums, 0.5 * LIMIT * LOG2_E))
    return of_q, of_k, tl.exp2(start), tl.exp2(total - end), tl.exp2(total), tl.min(mild.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["length", "num_chunks"])
def mild_scores_kernel(
    q_ptr, k_ptr, g_ptr, documents_ptr, masks_ptr,
    q_start_ptr, k_end_ptr, scores_ptr, through_ptr, kind_ptr,  # as scores_kernel; kind [B, H, N] int32
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
    length, num_chunks, heads, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr, TENSOR_MEMORY: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The results of scores_kernel for mild chunks; scores_kernel overwrites those of the others.

    The kind of a chunk is 0 if not mild, 1 if mild and starting with a document, 2 if mild and continuing one.
    """
    DTYPE: tl.constexpr = q_start_ptr.dtype.element_ty
    chunk = tl.program_id(0) % num_chunks
    batch_head = (tl.program_id(0) // num_chunks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    row, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    first = chunk.to(tl.int64) * CHUNK
    live = first + row < length
    block = batch_head * num_chunks * CHUNK + first
    q_ptr += batch * q_b + head * q_h + first * q_t
    k_ptr += batch * k_b + head * k_h + first * k_t
    g_ptr += batch * g_b + head * g_h + first * g_t
    document, entering, leaving = row, first, first
    kind = 2
    if DOCUMENTS:
        documents_ptr += batch * length
        document, entering, leaving = same_document(documents_ptr, first, row, length)
        kind = (tl.load(documents_ptr + first) == leaving).to(tl.int32) + (entering == leaving).to(tl.int32)
    past, _ = document_masks(masks_ptr, row, column, document, DOCUMENTS)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, K, BLOCK_K):
        channel = start + tl.arange(0, BLOCK_K)
        mask = live[:, None] & (channel < K)[None, :]
        q = load_rows(q_ptr, q_t, row, channel, mask)
        k, g = load_keys(k_ptr, g_ptr, k_t, g_t, row, channel, mask, LOWEST, K, GATES, not TENSOR_MEMORY)
        of_q, of_k, to_start, to_end, through, mild = middle_decays(g, past, row, DTYPE, TENSOR_MEMORY)
        q, k = q.to(tl.float32) * (of_q * scale), k.to(tl.float32) * of_k
        scores = tl.dot(q.to(DTYPE), tl.trans(k.to(DTYPE)), scores)
        kind *= mild
        q *= to_start[None, :]
        k *= to_end[None, :]
        if DOCUMENTS:
            q = tl.where((document == entering)[:, None], q, 0.0)
            k = tl.where((document == leaving)[:, None], k, 0.0)
            through = tl.where(entering == leaving, through, 0.0)
        at, wide = row[:, None] * K + channel[None, :], (channel < K)[None, :]
        tl.store(q_start_ptr + block * K + at, q.to(DTYPE), mask=wide)
        tl.store(k_end_ptr + block * K + at, k.to(DTYPE), mask=wide)
        tl.store(through_ptr + (batch_head * num_chunks + chunk) * K + channel, through, mask=channel < K)
    scores = tl.where(row[:, None] >= column[None, :], scores, 0.0)
    tl.store(scores_ptr + block * CHUNK + row[:, None] * CHUNK + column[None, :], scores.to(DTYPE))
    tl.store(kind_ptr + batch_head * num_chunks + chunk, kind)


@triton.jit(do_not_specialize=["length", "num_chunks"])
def mild_gradients_kernel(
    q_ptr, k_ptr, g_ptr, masks_ptr, kind_ptr,
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
    dq_ptr, dk_ptr, dg_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
    length, num_chunks, heads, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of gradients_kernel for mild chunks."""
    DTYPE: tl.constexpr = dscores_ptr.dtype.element_ty
    chunk = tl.program_id(0) % num_chunks
    batch_head = (tl.program_id(0) // num_chunks).to(tl.int64)
    kind = tl.load(kind_ptr + batch_head * num_chunks + chunk)
    if kind == 0:
        return
    batch, head = batch_head // heads, batch_head % heads
    row, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    first = chunk.to(tl.int64) * CHUNK
    live = first + row < length
    block = batch_head * num_chunks * CHUNK + first
    channel = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask, wide = live[:, None] & (channel < K)[None, :], (channel < K)[None, :]
    base = ((batch * length + first) * heads + head) * K
    out = row[:, None] * heads * K + channel[None, :]
    # Loads come first, so that they overlap; one more would spill registers.
    g = load_rows(g_ptr + batch * g_b + head * g_h + first * g_t, g_t, row, channel, mask)
    past, future = document_masks(masks_ptr, row, column, row, False)
    q = load_rows(q_ptr + batch * q_b + head * q_h + first * q_t, q_t, row, channel, mask)
    k = load_rows(k_ptr + batch * k_b + head * k_h + first * k_t, k_t, row, channel, mask)
    dscores = tl.load(dscores_ptr + block * CHUNK + row[:, None] * CHUNK + column[None, :])
    own = tl.load(dself_ptr + block + row)[:, None]
    dk_end = load_rows(dk_end_ptr + block * K, K, row, channel, wide)
    dthrough = tl.load(dthrough_ptr + (batch_head * num_chunks + chunk) * K + channel, mask=channel < K, other=0.0)

    g = tl.maximum(g, LOWEST) * LOG2_E
    sums = add_product(past, g, tl.zeros_like(g), DTYPE, 2)
    middle = 0.5 * tl.sum(tl.where((row == CHUNK - 1)[:, None], sums, 0.0), axis=0)
    of_q, of_k, to_end = tl.exp2(sums - middle[None, :]), tl.exp2(middle[None, :] - sums), tl.exp2(middle)
    # A document that starts with this chunk has no state from the chunk before.
    continues = tl.where(kind == 2, 1.0, 0.0)
    x_q, x_k = (q.to(tl.float32) * (of_q * scale)).to(DTYPE), (k.to(tl.float32) * of_k).to(DTYPE)

    dx = tl.dot(tl.trans(dscores), x_q)
    dsums = -x_k.to(tl.float32) * dx
    dk_end = dk_end.to(tl.float32) * to_end[None, :]
    # The pair of a token with itself has no decay: it adds to dq and dk (of_q of_k = 1), not to dg.
    dk = (dx + dk_end + own * x_q.to(tl.float32)) * of_k
    tl.store(dk_ptr + base + out, dk.to(dk_ptr.dtype.element_ty), mask=mask)
    dg = tl.zeros_like(dk) + (dthrough * to_end * to_end * continues)[None, :]
    dg = add_product(tl.trans(future), x_k.to(tl.float32) * dk_end, dg, DTYPE, 1)

    dq_start = load_rows(dq_start_ptr + block * K, K, row, channel, wide)
    dx = tl.dot(dscores, x_k)
    dx += dq_start.to(tl.float32) * (to_end * continues)[None, :]
    dsums += x_q.to(tl.float32) * dx
    dq = (dx + own * x_k.to(tl.float32)) * (of_q * scale)
    tl.store(dq_ptr + base + out, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    dg = add_product(tl.trans(past), dsums, dg, DTYPE, 2)
    tl.store(dg_ptr + base + out, dg, mask=mask)


@triton.jit(do_not_specialize=["length", "num_chunks"])
def mild_gate_gradients_kernel(
    q_ptr, logit_ptr, bound_ptr, masks_ptr, kind_ptr,
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
    dq_ptr, dlogit_ptr, dbound_ptr,  # dbound [B, H, N, K] fp32
    q_b, q_t, q_h, l_b, l_t, l_h, b_h,
    length, num_chunks, heads, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """mild_gradients_kernel of tied forget gates, as the gradients_kernel with GATES: dk comes last, to meet dg."""
    DTYPE: tl.constexpr = dscores_ptr.dtype.element_ty
    chunk = tl.program_id(0) % num_chunks
    batch_head = (tl.program_id(0) // num_chunks).to(tl.int64)
    kind = tl.load(kind_ptr + batch_head * num_chunks + chunk)
    if kind == 0:
        return
    batch, head = batch_head // heads, batch_head % heads
    row, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    first = chunk.to(tl.int64) * CHUNK
    live = first + row < length
    block = batch_head * num_chunks * CHUNK + first
    channel = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask, wide = live[:, None] & (channel < K)[None, :], (channel < K)[None, :]
    base = ((batch * length + first) * heads + head) * K
    out = row[:, None] * heads * K + channel[None, :]
    logit_ptr += batch * l_b + head * l_h + first * l_t
    logit, bound = load_logit(logit_ptr, bound_ptr + head * b_h, l_t, row, channel, mask, K)
    past, future = document_masks(masks_ptr, row, column, row, False)
    q = load_rows(q_ptr + batch * q_b + head * q_h + first * q_t, q_t, row, channel, mask)
    dscores = tl.load(dscores_ptr + block * CHUNK + row[:, None] * CHUNK + column[None, :])
    own = tl.load(dself_ptr + block + row)[:, None]
    dq_start = load_rows(dq_start_ptr + block * K, K, row, channel, wide)
    dthrough = tl.load(dthrough_ptr + (batch_head * num_chunks + chunk) * K + channel, mask=channel < K, other=0.0)

    k, g = gate_key(as_result(logit), bound)
    sums = add_product(past, g, tl.zeros_like(g), DTYPE, 2)
    middle = 0.5 * tl.sum(tl.where((row == CHUNK - 1)[:, None], sums, 0.0), axis=0)
    of_q, of_k, to_end = tl.exp2(sums - middle[None, :]), tl.exp2(middle[None, :] - sums), tl.exp2(middle)
    continues = tl.where(kind == 2, 1.0, 0.0)
    x_q, x_k = (q.to(tl.float32) * (of_q * scale)).to(DTYPE), (k * of_k).to(DTYPE)

    dk_end = load_rows(dk_end_ptr + block * K, K, row, channel, wide)
    dx = tl.dot(dscores, x_k)
    dx += dq_start.to(tl.float32) * (to_end * continues)[None, :]
    dsums = x_q.to(tl.float32) * dx
    dq = (dx + own * x_k.to(tl.float32)) * (of_q * scale)
    tl.store(dq_ptr + base + out, dq.to(dq_ptr.dtype.element_ty), mask=mask)

    dx = tl.dot(tl.trans(dscores), x_q)
    dsums -= x_k.to(tl.float32) * dx
    dk_end = dk_end.to(tl.float32) * to_end[None, :]
    dk = (dx + dk_end + own * x_q.to(tl.float32)) * of_k
    dg = tl.zeros_like(dk) + (dthrough * to_end * to_end * continues)[None, :]
    dg = add_product(tl.trans(future), x_k.to(tl.float32) * dk_end, dg, DTYPE, 1)
    dg = add_product(tl.trans(past), dsums, dg, DTYPE, 2)
    # Loaded again after a store, which keeps the compiler from holding the gates in registers.
    logit, bound = load_logit(logit_ptr, bound_ptr + head * b_h, l_t, row, channel, mask, K)
    store_gradients(dlogit_ptr + base, dbound_ptr, dk, dg, logit, bound, live, channel, out, mask, K)
