"""Linear recurrence with a data-dependent scalar decay a token and head (Mamba-2), every phase parallel over chunks.

    S_t = e^{g_t} S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t

chunk_state_kernel: what each chunk adds to the state (from the end: to its gradient); fold_kernel: the states that
enter chunks; output_kernel: o. key_gradient_kernel sums dq and dk over the heads that share q and k in registers;
value_gradient_kernel: dv and dg. Sums of g between two tokens of a chunk are differences in fp64, restarted at each
document; the gradient of g is taken from pairs of different tokens alone, so that nothing large cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.tiles import aligned, tiled
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _add_restarting(x, x_starts, y, y_starts):
    """Sums that restart: (sum, whether a start lies in it)."""
    return tl.where(y_starts != 0, y, x + y), x_starts | y_starts


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _running_sum(x, starts, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr):
    """Inclusive sums over [C], restarted where `starts` is not 0 when there are documents."""
    if DOCUMENTS:
        return tl.associative_scan((x, starts), 0, _add_restarting, reverse=REVERSE)[0]
    return tl.associative_scan(x, 0, _add, reverse=REVERSE)


@triton.jit
def _decays(g_ptr, documents_ptr, start, length, stride, DOCUMENTS: tl.constexpr, C: tl.constexpr):
    """Of a chunk: fp64 sums of g up to each token of its document [C]; decays from the start to each token and from
    each to the end [C], and through the chunk, zero across a start of a document; documents, and the marks of their
    first and last tokens."""
    index = tl.arange(0, C)
    count = tl.minimum(length - start, C)
    last_index = count - 1
    g = tl.load(g_ptr + (start.to(tl.int64) + index) * stride, mask=index < count, other=0.0).to(tl.float64)
    document = index
    firsts = tl.zeros([C], tl.int32)
    lasts = firsts
    if DOCUMENTS:
        place = tl.minimum(index, last_index)
        document = tl.load(documents_ptr + start + place)
        firsts = (document != tl.load(documents_ptr + start + tl.maximum(place - 1, 0))).to(tl.int32)
        lasts = (document != tl.load(documents_ptr + start + tl.minimum(place + 1, last_index))).to(tl.int32)
    sums = _running_sum(g, firsts, DOCUMENTS, False)
    total = tl.sum(tl.where(index == last_index, sums, 0.0), axis=0)
    from_start = tl.exp(sums.to(tl.float32))
    to_end = tl.exp(tl.minimum(total - sums, 0.0).to(tl.float32))
    through = tl.exp(total.to(tl.float32))
    if DOCUMENTS:
        before = tl.load(documents_ptr + tl.maximum(start - 1, 0))
        last = tl.load(documents_ptr + start + last_index)
        from_start = tl.where(document == before, from_start, 0.0)
        to_end = tl.where(document == last, to_end, 0.0)
        through = tl.where(before == last, through, 0.0)
    return sums, from_start, to_end, through, document, firsts, lasts


@triton.jit
def _pair_decay(sums, document, DOCUMENTS: tl.constexpr, C: tl.constexpr):
    """[C, C] decay between tokens s <= t of one document, else 0."""
    index = tl.arange(0, C)
    visible = index[:, None] >= index[None, :]
    if DOCUMENTS:
        visible = visible & (document[:, None] == document[None, :])
    between = (sums[:, None] - sums[None, :]).to(tl.float32)
    return tl.where(visible, tl.exp(tl.minimum(between, 0.0)), 0.0)


@triton.jit(do_not_specialize=["length", "chunks"])
def chunk_state_kernel(
    k_tiles, v_tiles, g_ptr, documents_ptr, states_ptr, through_ptr, length, heads, group, chunks,
    KEY: tl.constexpr, VALUE: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr, C: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """states [B H, chunks, KEY, VALUE]: the keys of chunk n decayed to its end (REVERSE: the queries decayed from its
    start) times the values; `through` [B H, chunks]: the decay through it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    batch, head, wide_row = row // heads, row % heads, row.to(tl.int64)
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    g_ptr += batch.to(tl.int64) * length * heads + head
    start = chunk * C
    k = k_tiles.load([batch, head // group, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    v = v_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(tl.float32)
    _, from_start, to_end, through, _, _, _ = _decays(g_ptr, documents_ptr, start, length, heads, DOCUMENTS, C)
    weighted = (v * (from_start if REVERSE else to_end)[:, None]).to(OPERAND)
    state = tl.dot(tl.trans(k), weighted, input_precision=PRECISION)
    key, value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    states_ptr += (wide_row * chunks + chunk) * KEY * VALUE
    inside = (key < KEY)[:, None] & (value < VALUE)[None, :]
    tl.store(states_ptr + key[:, None] * VALUE + value[None, :], state, mask=inside)
    tl.store(through_ptr + wide_row * chunks + chunk, through)


@triton.jit(do_not_specialize=["chunks"])
def fold_kernel(
    states_ptr, through_ptr, boundary_ptr, leaving_ptr, chunks, SIZE: tl.constexpr, REVERSE: tl.constexpr,
    BOUNDARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place, states [rows, chunks, SIZE]: what each chunk adds -> what enters it; `boundary` enters the first,
    `leaving` leaves the last (REVERSE: the other way round), both [rows, SIZE] fp32."""
    program, tiles = tl.program_id(0), tl.cdiv(SIZE, BLOCK)
    row, column = (program // tiles).to(tl.int64), program % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    states_ptr += row * chunks * SIZE
    state = tl.zeros([BLOCK], tl.float32)
    if BOUNDARY:
        state = tl.load(boundary_ptr + row * SIZE + column, mask=mask, other=0.0)
    for i in range(0, chunks):
        chunk = tl.cast(chunks - 1 - i if REVERSE else i, tl.int64)
        added = tl.load(states_ptr + chunk * SIZE + column, mask=mask, other=0.0).to(tl.float32)
        through = tl.load(through_ptr + row * chunks + chunk)
        tl.store(states_ptr + chunk * SIZE + column, state, mask=mask)
        state = tl.where(through > 0.0, state * through, 0.0) + added
    tl.store(leaving_ptr + row * SIZE + column, state, mask=mask)


@triton.jit(do_not_specialize=["length", "chunks"])
def output_kernel(
    q_tiles, k_tiles, v_tiles, o_tiles, g_ptr, documents_ptr, state_tiles, length, heads, group, chunks,
    DOCUMENTS: tl.constexpr, C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = (Q K^T * D) V + e^b Q S for one chunk of one head, S the state entering the chunk."""
    head, chunk = tl.program_id(0) % heads, tl.program_id(1)
    row, batch = tl.program_id(0), tl.program_id(0) // heads
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    g_ptr += batch.to(tl.int64) * length * heads + head
    start = chunk * C
    q = q_tiles.load([batch, head // group, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    k = k_tiles.load([batch, head // group, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    v = v_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
    state = state_tiles.load([row * chunks + chunk, 0, 0]).reshape([BLOCK_KEY, BLOCK_VALUE]).to(OPERAND)
    sums, from_start, _, _, document, _, _ = _decays(g_ptr, documents_ptr, start, length, heads, DOCUMENTS, C)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _pair_decay(sums, document, DOCUMENTS, C)
    o = tl.dot(q, state, input_precision=PRECISION) * from_start[:, None]
    o = tl.dot(scores.to(OPERAND), v, o, input_precision=PRECISION)
    o_tiles.store([batch, head, start, 0], o.to(o_tiles.dtype).reshape([1, 1, C, BLOCK_VALUE]))


@triton.jit(do_not_specialize=["length", "chunks"])
def key_gradient_kernel(
    q_tiles, k_tiles, v_tiles, do_tiles, dq_tiles, dk_tiles, g_ptr, documents_ptr, state_tiles, gradient_tiles,
    length, heads, group, chunks,
    DOCUMENTS: tl.constexpr, C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk of one chunk, summed over a group of heads; G is the gradient of the state leaving the chunk.

    W = (dO V^T) * D;  dq = (sum_h W) K + sum_h e^b dO S^T,  dk = (sum_h W)^T Q + sum_h e^{c - b} V G^T
    """
    chunk, heads_of_keys = tl.program_id(1), heads // group
    batch, key_head = tl.program_id(0) // heads_of_keys, tl.program_id(0) % heads_of_keys
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    start = chunk * C
    dq = tl.zeros([C, BLOCK_KEY], tl.float32)
    dk = tl.zeros([C, BLOCK_KEY], tl.float32)
    weights = tl.zeros([C, C], tl.float32)
    for i in range(0, group):
        head = key_head * group + i
        token = batch.to(tl.int64) * length * heads + head
        place = (batch * heads + head) * chunks + chunk
        v = v_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
        do = do_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
        state = state_tiles.load([place, 0, 0]).reshape([BLOCK_KEY, BLOCK_VALUE]).to(OPERAND)
        gradient = gradient_tiles.load([place, 0, 0]).reshape([BLOCK_KEY, BLOCK_VALUE]).to(OPERAND)
        sums, from_start, to_end, _, document, _, _ = _decays(
            g_ptr + token, documents_ptr, start, length, heads, DOCUMENTS, C
        )
        decay = _pair_decay(sums, document, DOCUMENTS, C)
        weights += tl.dot(do, tl.trans(v), input_precision=PRECISION) * decay
        scaled = (do.to(tl.float32) * from_start[:, None]).to(OPERAND)
        dq = tl.dot(scaled, tl.trans(state), dq, input_precision=PRECISION)
        scaled = (v.to(tl.float32) * to_end[:, None]).to(OPERAND)
        dk = tl.dot(scaled, tl.trans(gradient), dk, input_precision=PRECISION)
    q = q_tiles.load([batch, key_head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    k = k_tiles.load([batch, key_head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    dq = tl.dot(weights.to(OPERAND), k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(weights.to(OPERAND)), q, dk, input_precision=PRECISION)
    dq_tiles.store([batch, key_head, start, 0], dq.to(dq_tiles.dtype).reshape([1, 1, C, BLOCK_KEY]))
    dk_tiles.store([batch, key_head, start, 0], dk.to(dk_tiles.dtype).reshape([1, 1, C, BLOCK_KEY]))


@triton.jit(do_not_specialize=["length", "chunks"])
def value_gradient_kernel(
    q_tiles, k_tiles, v_tiles, do_tiles, dv_tiles, g_ptr, dg_ptr, documents_ptr, state_tiles, gradient_tiles,
    length, heads, group, chunks,
    DOCUMENTS: tl.constexpr, C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv and dg of one chunk of one head; G is the gradient of the state leaving the chunk.

    A = Q K^T * D,  dv = A^T dO + e^{c - b} K G;  dg_j sums, over s < j <= t: A_ts (do_t . v_s), what q_t takes from S,
    what k_s gives to G, and e^c <S, G>
    """
    head, chunk = tl.program_id(0) % heads, tl.program_id(1)
    row, batch = tl.program_id(0), tl.program_id(0) // heads
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    token = batch.to(tl.int64) * length * heads + head
    start, index = chunk * C, tl.arange(0, C)
    state = state_tiles.load([row * chunks + chunk, 0, 0]).reshape([BLOCK_KEY, BLOCK_VALUE])
    gradient = gradient_tiles.load([row * chunks + chunk, 0, 0]).reshape([BLOCK_KEY, BLOCK_VALUE])
    crossing = tl.sum(tl.sum(state.to(tl.float32) * gradient.to(tl.float32), axis=1), axis=0)
    q = q_tiles.load([batch, head // group, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    k = k_tiles.load([batch, head // group, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    v = v_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
    do = do_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
    sums, from_start, to_end, through, document, firsts, lasts = _decays(
        g_ptr + token, documents_ptr, start, length, heads, DOCUMENTS, C
    )
    taken = tl.dot(q, state.to(OPERAND), input_precision=PRECISION) * from_start[:, None]
    taken_sum = tl.sum(taken * do.to(tl.float32), axis=1)
    dv = tl.dot(k, gradient.to(OPERAND), input_precision=PRECISION) * to_end[:, None]
    given_sum = tl.sum(dv * v.to(tl.float32), axis=1)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * _pair_decay(sums, document, DOCUMENTS, C)
    dv = tl.dot(tl.trans(scores.to(OPERAND)), do, dv, input_precision=PRECISION)
    dv_tiles.store([batch, head, start, 0], dv.to(dv_tiles.dtype).reshape([1, 1, C, BLOCK_VALUE]))
    pairs = tl.dot(do, tl.trans(v), input_precision=PRECISION) * scores
    pairs = tl.where(index[:, None] > index[None, :], pairs, 0.0)
    from_here = tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
    dg = _running_sum(from_here + taken_sum, lasts, DOCUMENTS, True)
    dg += _running_sum(given_sum, firsts, DOCUMENTS, False) - given_sum
    dg += tl.where(through > 0.0, through * crossing, 0.0)
    tl.store(dg_ptr + token + (start.to(tl.int64) + index) * heads, dg, mask=start + index < length)


def _chunk(dtype: torch.dtype) -> int:
    return 64 if dtype == torch.bfloat16 else 32


def _stages(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1


def _constants(k: Tensor, v: Tensor, documents: Tensor | None) -> dict[str, object]:
    """bf16 operands as they are; fp16, whose range states leave, and fp32 through fp32 operands."""
    key, value, narrow = k.shape[3], v.shape[3], v.dtype == torch.bfloat16
    return {
        "DOCUMENTS": documents is not None,
        "C": _chunk(v.dtype),
        "BLOCK_KEY": max(16, triton.next_power_of_2(key)),
        "BLOCK_VALUE": max(16, triton.next_power_of_2(value)),
        "OPERAND": tl.bfloat16 if narrow else tl.float32,
        "PRECISION": "ieee" if narrow else "tf32x3",
    }


def _tiled(x: Tensor) -> TensorDescriptor:
    """[B, T, H, D] in chunks of one head."""
    return tiled(x, _chunk(x.dtype), max(16, triton.next_power_of_2(x.shape[3])))


def _state_tiles(x: Tensor) -> TensorDescriptor:
    """[B, H, N, K, V], one state a tile."""
    block = [1, *(max(16, triton.next_power_of_2(n)) for n in x.shape[3:])]
    return TensorDescriptor.from_tensor(x.flatten(0, 2), block)


def _states(
    k: Tensor, v: Tensor, g: Tensor, documents: Tensor | None, boundary: Tensor | None, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """What enters each chunk [B, H, N, K, V] in the dtype of products' operands, and what leaves all [B, H, K, V]."""
    (batch, length, key_heads, key), (heads, value) = k.shape, v.shape[2:]
    constants = _constants(k, v, documents)
    chunks = triton.cdiv(length, constants["C"])
    kept = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    states = v.new_empty(batch, heads, chunks, key, value, dtype=kept)
    through = v.new_empty(batch, heads, chunks, dtype=torch.float32)
    leaving = v.new_empty(batch, heads, key, value, dtype=torch.float32)
    chunk_state_kernel[batch * heads, chunks](
        _tiled(k), _tiled(v), g, documents, states, through, length, heads, heads // key_heads, chunks,
        KEY=key, VALUE=value, REVERSE=reverse, **constants, num_warps=4,
    )  # fmt: skip
    fold_kernel[batch * heads * triton.cdiv(key * value, 1024),](
        states, through, boundary, leaving, chunks, SIZE=key * value, REVERSE=reverse, BOUNDARY=boundary is not None,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return states, leaving


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H or 1, K], v [B, T, H, V], g [B, T, H] and initial [B, H, K, V] fp32, documents [B, T], the last
    three contiguous -> o like v, and the last state."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    batch, length, heads, _ = v.shape
    states, leaving = _states(k, v, g, documents, initial, reverse=False)
    o = v.new_empty(v.shape)
    output_kernel[batch * heads, states.shape[2]](
        *(_tiled(x) for x in (q, k, v, o)), g, documents, _state_tiles(states), length, heads, heads // k.shape[2],
        states.shape[2], **_constants(k, v, documents), num_warps=4,
    )  # fmt: skip
    return o, leaving


def backward(
    do: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, dg, and the gradient of `initial`; the states are formed again."""
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    (batch, length, heads, _), key_heads = v.shape, k.shape[2]
    states, _ = _states(k, v, g, documents, initial, reverse=False)
    gradients, d_initial = _states(q, do, g, documents, d_leaving, reverse=True)
    dq, dk, dv, dg = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), g.new_empty(g.shape)
    chunks, group, constants = states.shape[2], heads // key_heads, _constants(k, v, documents)
    tiled = [_tiled(x) for x in (q, k, v, do)]
    shared = (documents, _state_tiles(states), _state_tiles(gradients), length, heads, group, chunks)
    key_gradient_kernel[batch * key_heads, chunks](
        *tiled, _tiled(dq), _tiled(dk), g, *shared, **constants, num_warps=8, num_stages=_stages(v.dtype)
    )
    value_gradient_kernel[batch * heads, chunks](*tiled, _tiled(dv), g, dg, *shared, **constants, num_warps=4)
    return dq, dk, dv, dg, d_initial


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    key, value, chunk = 128, 64, _chunk(torch.bfloat16)
    types = {f"{n}_tiles": f"tensordesc<bf16[1, 1, {chunk}, {key}]>" for n in ("q", "k", "dq", "dk")}
    types |= {f"{n}_tiles": f"tensordesc<bf16[1, 1, {chunk}, {value}]>" for n in ("v", "o", "do", "dv")}
    types |= {f"{n}_tiles": f"tensordesc<bf16[1, {key}, {value}]>" for n in ("state", "gradient")}
    types |= {f"{n}_ptr": "*fp32" for n in ("g", "dg", "through", "boundary", "leaving")}
    types |= {"states_ptr": "*bf16", "documents_ptr": "*i32"}
    types |= dict.fromkeys(("length", "heads", "group", "chunks"), "i32")
    constants = {"KEY": key, "VALUE": value, "C": chunk, "BLOCK_KEY": key, "BLOCK_VALUE": value, "SIZE": key * value}
    constants |= {"BLOCK": 1024, "OPERAND": tl.bfloat16, "PRECISION": "ieee", "REVERSE": True, "BOUNDARY": True}
    cases: list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]] = []
    warps = {chunk_state_kernel: 4, fold_kernel: 4, output_kernel: 4, key_gradient_kernel: 8, value_gradient_kernel: 4}
    for documents in (False, True):
        switches = {"DOCUMENTS": documents} if documents else {"DOCUMENTS": documents, "documents_ptr": None}
        for kernel, number in warps.items():
            chosen = {name: x for name, x in {**constants, **switches}.items() if name in kernel.arg_names}
            signature = {name: x for name, x in types.items() if name in kernel.arg_names and name not in chosen}
            cases.append((kernel, signature, chosen, {"num_warps": number, "num_stages": 2}))
    return cases
