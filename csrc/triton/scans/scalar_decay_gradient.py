"""dq, dk and dg of the linear recurrence with a data-dependent scalar decay, from the states between chunks.

    W = sum_h (dO V^T) * D;    dq = W K + sum_h e^b dO S^T,    dk = W^T Q + sum_h e^{c - b} V G^T

The sums are over the heads that share q and k; S enters a chunk, G is the gradient of the state that leaves it.
pair_kernel computes W; carried_kernel, once with S and once with G, the rest. Both also write the terms of dg per token
and head, q_t . (dq_t from other tokens) and k_t . (dk_t from other tokens), which scalar_decay_chunk.py sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.chips import shared_bytes
from megalin._triton.dispatch.tiles import tiled
from megalin._triton.scans.scalar_decay_chunk import (
    Decays,
    ScalarDecayTiles,
    constants,
    gradient_chunk_of,
    log_decay_gradient,
    power,
)
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _run_of_heads(heads, group, run):
    """Batch, head of q and k, first head of the run, and index of its sums in [runs B]."""
    tile, runs, shared = tl.program_id(0), group // run, heads // group
    batch, key_head, nth = tile // (shared * runs), tile // runs % shared, tile % runs
    return batch, key_head, key_head * group + nth * run, nth * (tl.num_programs(0) // (shared * runs)) + batch


@triton.jit(do_not_specialize=["length", "chunks"])
def pair_kernel(
    q_tiles, k_tiles, v_tiles, do_tiles, weight_tiles, sums_ptr, documents_ptr, inside_ptr, between_ptr,
    length, heads, group, run, chunks,
    DOCUMENTS: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    STAGES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W [tiles chunks, C, C] of one chunk and run of heads; and per head and token, the pair terms of dg it takes minus
    those it gives [B, H, chunks C], `inside` its piece of the chunk and `between` pieces. With two pieces a chunk,
    programs 0 and 1 compute W's diagonal blocks, program 2 the block below."""
    chunk, part, index = tl.program_id(1), tl.program_id(2), tl.arange(0, PIECE)
    batch, key_head, first, _ = _run_of_heads(heads, group, run)
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    after, before = tl.where(part > 0, PIECE, 0), tl.where(part == 1, PIECE, 0)
    taking, giving = chunk * C + after, chunk * C + before
    q = q_tiles.load([batch, key_head, taking, 0]).reshape([PIECE, BLOCK_KEY]).to(OPERAND)
    k = k_tiles.load([batch, key_head, giving, 0]).reshape([PIECE, BLOCK_KEY]).to(OPERAND)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    visible = (after + index)[:, None] >= (before + index)[None, :]
    if DOCUMENTS:
        document = tl.load(documents_ptr + tl.minimum(taking + index, length - 1))
        visible &= document[:, None] == tl.load(documents_ptr + tl.minimum(giving + index, length - 1))[None, :]
    scores = tl.where(visible & ((after + index)[:, None] > (before + index)[None, :]), scores, 0.0)
    weights = tl.zeros([PIECE, PIECE], tl.float32)
    for head in tl.range(first, first + run, num_stages=STAGES):
        place = ((batch.to(tl.int64) * heads + head) * chunks + chunk) * C
        v = v_tiles.load([batch, head, giving, 0]).reshape([PIECE, BLOCK_VALUE]).to(OPERAND)
        do = do_tiles.load([batch, head, taking, 0]).reshape([PIECE, BLOCK_VALUE]).to(OPERAND)
        sums = tl.load(sums_ptr + place + after + index)
        sums = sums[:, None] - tl.load(sums_ptr + place + before + index)[None, :]
        pairs = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        pairs *= tl.exp2(tl.minimum(sums, 0.0).to(tl.float32))
        weights += pairs
        pairs *= scores
        took, gave = tl.sum(pairs, axis=1), tl.sum(pairs, axis=0)
        if C > PIECE and part == 2:
            tl.store(between_ptr + place + after + index, took)
            tl.store(between_ptr + place + before + index, -gave)
        else:
            tl.store(inside_ptr + place + after + index, took - gave)
    # Other pairs have finite weights so far, and scores of zero.
    tile, weights = tl.program_id(0) * chunks + chunk, tl.where(visible, weights, 0.0).to(OPERAND)
    weight_tiles.store([tile, after, before], weights.reshape([1, PIECE, PIECE]))
    if C > PIECE and part == 0:
        weight_tiles.store([tile, 0, PIECE], tl.zeros([1, PIECE, PIECE], OPERAND))


@triton.jit
def _rounding_error(states_ptr, row, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_KEY: tl.constexpr,
                  BLOCK_VALUE: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Rounding error of a state [rows, KEY, VALUE] as a matmul operand, [BLOCK_VALUE, BLOCK_KEY]."""
    key, value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    inside = (key < KEY)[None, :] & (value < VALUE)[:, None]
    offset = row * KEY * VALUE + key[None, :] * VALUE + value[:, None]
    state = tl.load(states_ptr + offset, mask=inside, other=0.0)
    return (state - state.to(OPERAND).to(tl.float32)).to(OPERAND)


@triton.jit
def _carried(x, y, state, factor, out, PRECISION: tl.constexpr):
    """out + f X S, and y . (f X S) per token, f [C]."""
    scaled = x.to(tl.float32) * factor[:, None]
    out = tl.dot(scaled.to(x.dtype), state, out, input_precision=PRECISION)
    reached = tl.dot(y, tl.trans(state), input_precision=PRECISION)
    return out, tl.sum(reached * scaled, axis=1)


@triton.jit
def _inner(x, y):
    """Sum over all elements of x * y."""
    return tl.sum(tl.sum(x.to(tl.float32) * y.to(tl.float32), axis=1), axis=0)


@triton.jit(do_not_specialize=["chunks"])
def carried_kernel(
    x_tiles, y_tiles, z_tiles, out_tiles, weight_tiles, state_tiles, other_tiles, factor_ptr, through_ptr,
    boundary_ptr, other_boundary_ptr, carried_ptr, crossing_ptr, heads, group, run, chunks,
    KEY: tl.constexpr, VALUE: tl.constexpr, REVERSE: tl.constexpr, BOUNDARY: tl.constexpr, OTHER: tl.constexpr,
    C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    STAGES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W Z + sum_h f_h X_h S_h of one chunk, and y . (f_h X_h S_h) per head and token [B, H, chunks C].

    dq: x, y, z = do, q, k, S with f from the start. REVERSE, dk: v, k, q, G in place of S with f to the end, W^T; and
    `crossing` [B, H, chunks], the decay through the chunk times <S, G>, with S in `other_tiles`. BOUNDARY, OTHER: the
    first state in the direction of S, and of the other, is given in fp32 and used so for the terms of dg.
    """
    chunk, index = tl.program_id(1), tl.arange(0, C)
    batch, key_head, first, place_of_sum = _run_of_heads(heads, group, run)
    start = chunk * C
    y = y_tiles.load([batch, key_head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    z = z_tiles.load([batch, key_head, start, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
    weights = weight_tiles.load([tl.program_id(0) * chunks + chunk, 0, 0]).reshape([C, C])
    out = tl.dot(tl.trans(weights) if REVERSE else weights, z, input_precision=PRECISION)
    for head in tl.range(first, first + run, num_stages=STAGES):
        row = batch.to(tl.int64) * heads + head
        place = row * chunks + chunk
        x = x_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_VALUE]).to(OPERAND)
        state = state_tiles.load([place.to(tl.int32), 0, 0]).reshape([BLOCK_VALUE, BLOCK_KEY])
        factor = tl.load(factor_ptr + place * C + index)
        if REVERSE:
            other = other_tiles.load([place.to(tl.int32), 0, 0]).reshape([BLOCK_VALUE, BLOCK_KEY])
            crossing, through = _inner(other, state), tl.load(through_ptr + place)
        out, carried = _carried(x, y, state, factor, out, PRECISION)
        if BOUNDARY and chunk == (chunks - 1 if REVERSE else 0):
            low = _rounding_error(boundary_ptr, row, KEY, VALUE, BLOCK_KEY, BLOCK_VALUE, OPERAND)
            out, more = _carried(x, y, low, factor, out, PRECISION)
            carried += more
            if REVERSE:
                crossing += _inner(other, low)
        if OTHER and chunk == 0:
            low = _rounding_error(other_boundary_ptr, row, KEY, VALUE, BLOCK_KEY, BLOCK_VALUE, OPERAND)
            crossing += _inner(low, state)
        tl.store(carried_ptr + place * C + index, carried)
        if REVERSE:
            tl.store(crossing_ptr + place, tl.where(through > 0.0, through * crossing, 0.0))
    out_tiles.store([place_of_sum, key_head, start, 0], out.to(out_tiles.dtype).reshape([1, 1, C, BLOCK_KEY]))


PROGRAMS = 264
"""Programs that fill the GPU; the sum over heads is cut into runs to reach them if there are few chunks."""


def _pair_tiles(key: int, value: int, dtype: torch.dtype) -> ScalarDecayTiles:
    return ScalarDecayTiles(power(value), 4, 3 if dtype == torch.bfloat16 and key <= 128 else 1)


def _carried_tiles(key: int, value: int, dtype: torch.dtype) -> ScalarDecayTiles:
    stages = 3 if shared_bytes() > 2**17 else 2
    if dtype != torch.bfloat16 or power(key) * power(value) > 8192:
        stages = 1
    return ScalarDecayTiles(power(value), 8, stages)


def _num_runs(group: int, programs: int) -> int:
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
    """Computes dq, dk and dg from S and G of all chunks [B H chunks, V, K]; `boundaries`: the first S, the last G."""
    (batch, length, heads, value), (key_heads, key) = v.shape, k.shape[2:]
    chunk, chunks, group = gradient_chunk_of(key, v.dtype), found.through.shape[2], heads // key_heads
    runs = _num_runs(group, batch * key_heads * chunks)
    grid, counts = (batch * key_heads * runs, chunks), (heads, group, group // runs, chunks)
    inside, between, taken, given = (found.from_start.new_empty(found.from_start.shape) for _ in range(4))
    crossing, wide = found.through.new_empty(found.through.shape), power(key)

    weights = kept[0].new_empty(grid[0] * chunks, chunk, chunk)
    tiles, piece = _pair_tiles(key, value, v.dtype), min(chunk, 64)
    pair_kernel[*grid, 3 if chunk > piece else 1](
        *(tiled(x, piece, wide) for x in (q, k)), *(tiled(x, piece, tiles.value) for x in (v, do)),
        TensorDescriptor.from_tensor(weights, [1, piece, piece]), found.sums, documents, inside,
        between if chunk > piece else None, length, *counts, DOCUMENTS=documents is not None,
        **constants(pair_kernel, key, value, v.dtype, tiles, chunk),
    )  # fmt: skip
    weight_tiles = TensorDescriptor.from_tensor(weights, [1, chunk, chunk])
    tiles = _carried_tiles(key, value, v.dtype)
    states = [TensorDescriptor.from_tensor(x, [1, tiles.value, wide]) for x in kept]
    # States are rounded only if operands are bf16.
    first, last = (x if v.dtype == torch.bfloat16 else None for x in boundaries)
    sums = []
    for reverse, x, y, z, factor, boundary, other, carried in (
        (False, do, q, k, found.from_start, first, None, taken),
        (True, v, k, q, found.to_end, last, first, given),
    ):
        out = y.new_empty(runs * batch, *y.shape[1:], dtype=y.dtype if runs == 1 else torch.float32)
        carried_kernel[grid](
            tiled(x, chunk, tiles.value), *(tiled(x, chunk, wide) for x in (y, z, out)), weight_tiles,
            *(states[::-1] if reverse else states), factor, found.through, boundary, other, carried, crossing, *counts,
            REVERSE=reverse, BOUNDARY=boundary is not None, OTHER=other is not None,
            **constants(carried_kernel, key, value, v.dtype, tiles, chunk),
        )  # fmt: skip
        sums.append(out if runs == 1 else out.unflatten(0, (runs, batch)).sum(0).to(y.dtype))
    return *sums, log_decay_gradient(
        inside, between if chunk > piece else None, taken, given, crossing, documents, length, chunk
    )
