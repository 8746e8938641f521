"""dq, dk and dg of the linear recurrence with a data-dependent scalar decay, from the states between chunks."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.scalar_decays import (
    Decays,
    Tiles,
    chunk_of,
    constants,
    log_decay_gradient,
    pair_decay,
    power,
)
from megalin._triton.tiles import tiled
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _rounded_away(states_ptr, row, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr,
                  BLOCK_VALUE: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """What a state [rows, KEY, VALUE] loses as an operand, [BLOCK_VALUE, BLOCK_KEY]."""
    key, value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    inside = (key < KEY)[None, :] & (value < VALUE)[:, None]
    offset = row * KEY * VALUE + key[None, :] * VALUE + value[:, None]
    state = tl.load(states_ptr + offset, mask=inside, other=0.0)
    return (state - state.to(OPERAND).to(tl.float32)).to(OPERAND)


@triton.jit(do_not_specialize=["length", "chunks"])
def key_gradient_kernel(
    q_tiles, k_tiles, v_tiles, do_tiles, dq_tiles, dk_tiles, sums_ptr, from_start_ptr, to_end_ptr, through_ptr,
    documents_ptr, state_tiles, gradient_tiles, initial_ptr, d_leaving_ptr, taken_ptr, given_ptr, crossing_ptr,
    length, heads, group, run, chunks,
    KEY: tl.constexpr, VALUE: tl.constexpr, DOCUMENTS: tl.constexpr, INITIAL: tl.constexpr, D_LEAVING: tl.constexpr,
    C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk [runs B, T, H / group, KEY] of one chunk, summed over a run of heads that share them, and the terms of
    dg; S enters the chunk, G is the gradient of the state that leaves it.

    W = (dO V^T) * D;  dq = (sum_h W) K + sum_h e^b dO S^T,  dk = (sum_h W)^T Q + sum_h e^{c - b} V G^T

    taken_t = q_t . (what of dq_t is of other tokens) - k_t . (what of dk_t is of the chunk's other tokens), given_s =
    k_s . (what of dk_s is of later chunks), crossing = e^c <S, G>. INITIAL, D_LEAVING: the first chunk's S, the last
    one's G are known in fp32, and enter dg so.
    """
    chunk, runs = tl.program_id(1), group // run
    tile, shared = tl.program_id(0), heads // group
    batch, key_head, first = tile // (shared * runs), tile // runs % shared, tile % runs * run
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    start, index = chunk * C, tl.arange(0, C)
    q = q_tiles.load([batch, key_head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    k = k_tiles.load([batch, key_head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = tl.where(index[:, None] > index[None, :], scores, 0.0)
    dq = tl.zeros([C, BLOCK_KEY], tl.float32)
    dk = tl.zeros([C, BLOCK_KEY], tl.float32)
    weights = tl.zeros([C, C], tl.float32)
    for i in range(0, run):
        head = key_head * group + first + i
        row = batch.to(tl.int64) * heads + head
        place = row * chunks + chunk
        v = v_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
        do = do_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
        state = state_tiles.load([place.to(tl.int32), 0, 0]).reshape([BLOCK_VALUE, BLOCK_KEY])
        gradient = gradient_tiles.load([place.to(tl.int32), 0, 0]).reshape([BLOCK_VALUE, BLOCK_KEY])
        pairs = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        pairs *= pair_decay(sums_ptr + place * C, documents_ptr, length, start, DOCUMENTS, True, C)
        weights += pairs
        pairs *= scores
        taken = tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
        crossing = tl.sum(tl.sum(state.to(tl.float32) * gradient.to(tl.float32), axis=1), axis=0)
        part = tl.dot(do, state, input_precision=PRECISION)
        if INITIAL and chunk == 0:
            low = _rounded_away(initial_ptr, row, KEY, VALUE, BLOCK_KEY, BLOCK_VALUE, OPERAND)
            crossing += tl.sum(tl.sum(low.to(tl.float32) * gradient.to(tl.float32), axis=1), axis=0)
            part = tl.dot(do, low, part, input_precision=PRECISION)
        part *= tl.load(from_start_ptr + place * C + index)[:, None]
        dq += part
        tl.store(taken_ptr + place * C + index, taken + tl.sum(part * q.to(tl.float32), axis=1))
        part = tl.dot(v, gradient, input_precision=PRECISION)
        if D_LEAVING and chunk == chunks - 1:
            low = _rounded_away(d_leaving_ptr, row, KEY, VALUE, BLOCK_KEY, BLOCK_VALUE, OPERAND)
            crossing += tl.sum(tl.sum(low.to(tl.float32) * state.to(tl.float32), axis=1), axis=0)
            part = tl.dot(v, low, part, input_precision=PRECISION)
        part *= tl.load(to_end_ptr + place * C + index)[:, None]
        dk += part
        tl.store(given_ptr + place * C + index, tl.sum(part * k.to(tl.float32), axis=1))
        through = tl.load(through_ptr + place)
        tl.store(crossing_ptr + place, tl.where(through > 0.0, through * crossing, 0.0))
    dq = tl.dot(weights.to(OPERAND), k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(weights.to(OPERAND)), q, dk, input_precision=PRECISION)
    batch += first // run * (tl.num_programs(0) // (shared * runs))
    dq_tiles.store([batch, key_head, start, 0], dq.to(dq_tiles.dtype).reshape([1, 1, C, BLOCK_KEY]))
    dk_tiles.store([batch, key_head, start, 0], dk.to(dk_tiles.dtype).reshape([1, 1, C, BLOCK_KEY]))


def _tiles(key: int, value: int, dtype: torch.dtype) -> Tiles:
    """Of key_gradient_kernel."""
    return Tiles(power(value), 8, 2 if dtype == torch.bfloat16 and power(key) * power(value) <= 8192 else 1)


PROGRAMS = 264
"""Programs that the sum over heads is cut into, at most, so that few chunks fill the chip."""


def _num_runs(group: int, programs: int) -> int:
    """Into how many programs the sum over a group of heads is cut, so that they fill the chip."""
    runs = 1
    while group % (2 * runs) == 0 and 2 * runs * programs <= PROGRAMS:
        runs *= 2
    return runs


def key_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    found: Decays,
    documents: Tensor | None,
    kept: tuple[Tensor, Tensor],
    boundaries: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dg from the states that both directions kept [B H chunks, V, K]; `boundaries`: what entered them."""
    (batch, length, heads, value), (key_heads, key) = v.shape, k.shape[2:]
    chunks, group, tiles, chunk = (
        found.through.shape[2],
        heads // key_heads,
        _tiles(key, value, v.dtype),
        chunk_of(key, v.dtype),
    )
    runs = _num_runs(group, batch * key_heads * chunks)
    shape, dtype = (runs * batch, length, key_heads, key), q.dtype if runs == 1 else torch.float32
    dq, dk = q.new_empty(shape, dtype=dtype), k.new_empty(shape, dtype=dtype)
    taken, given = (found.from_start.new_empty(found.from_start.shape) for _ in range(2))
    crossing = taken.new_empty(found.through.shape)
    # States are rounded only where operands are narrow.
    known = [x if v.dtype == torch.bfloat16 else None for x in boundaries]
    key_gradient_kernel[batch * key_heads * runs, chunks](
        *(tiled(x, chunk, power(key)) for x in (q, k)), *(tiled(x, chunk, tiles.value) for x in (v, do)),
        *(tiled(x, chunk, power(key)) for x in (dq, dk)), *found, documents,
        *(TensorDescriptor.from_tensor(x, [1, tiles.value, power(key)]) for x in kept), *known,
        taken, given, crossing, length, heads, group, group // runs, chunks,
        DOCUMENTS=documents is not None, INITIAL=known[0] is not None, D_LEAVING=known[1] is not None,
        **constants(key, value, v.dtype, tiles),
    )  # fmt: skip
    if runs > 1:
        dq, dk = (x.unflatten(0, (runs, batch)).sum(0).to(q.dtype) for x in (dq, dk))
    return dq, dk, log_decay_gradient(taken, given, crossing, documents, length, chunk)
