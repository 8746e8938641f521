"""Decays of a data-dependent scalar g in chunks, and the gradient of g from sums over pairs of tokens.

    c_t = sum of g_j over j <= t of its chunk and document,    from_start_t = e^{c_t},    to_end_t = e^{c_C - c_t}

Sums are in log2 units. g is clamped to -104, below which e^g underflows fp32, so that a sum over a chunk still resolves
later tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _add_restarting(x, x_starts, y, y_starts):
    """Associative operator of a segmented sum over (sum, restart flag)."""
    return tl.where(y_starts != 0, y, x + y), x_starts | y_starts


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _running_sum(x, starts, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr):
    """Inclusive cumulative sums over the first axis of [C, heads]; DOCUMENTS: restarted where `starts` [C] != 0."""
    if DOCUMENTS:
        starts = tl.broadcast_to(starts[:, None], x.shape)
        return tl.associative_scan((x, starts), 0, _add_restarting, reverse=REVERSE)[0]
    return tl.associative_scan(x, 0, _add, reverse=REVERSE)


@triton.jit
def _program(heads, chunks, C: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Batch, chunk, heads [BLOCK_HEADS], and the offsets [C, BLOCK_HEADS] of the chunk's tokens in [B, H, chunks C]."""
    tiles = tl.cdiv(heads, BLOCK_HEADS)
    batch, chunk = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    head = tl.program_id(0) % tiles * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    row = batch * heads + head
    return batch, chunk, head, (row * chunks + chunk)[None, :] * C + tl.arange(0, C)[:, None]


@triton.jit(do_not_specialize=["length", "chunks"])
def decays_kernel(
    g_ptr, documents_ptr, sums_ptr, from_start_ptr, to_end_ptr, through_ptr, length, heads, chunks,
    DOCUMENTS: tl.constexpr, C: tl.constexpr, BLOCK_HEADS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Computes c, from_start and to_end [B, H, chunks C], and the decay through each chunk [B, H, chunks], from g
    [B, T, H]; all but c are zero across a document's start."""
    batch, chunk, head, place = _program(heads, chunks, C, BLOCK_HEADS)
    index, start = tl.arange(0, C), chunk * C
    last = tl.minimum(length - start, C) - 1
    used = (head < heads)[None, :]
    token = batch * length + start + index
    g = tl.load(g_ptr + token[:, None] * heads + head[None, :], mask=(index <= last)[:, None] & used, other=0.0)
    g = tl.where(g < -104.0, -104.0, g).to(SUM) * 1.4426950408889634
    firsts = index
    if DOCUMENTS:
        documents_ptr += batch * length + start
        document = tl.load(documents_ptr + tl.minimum(index, last))
        firsts = (document != tl.load(documents_ptr + tl.minimum(tl.maximum(index - 1, 0), last))).to(tl.int32)
    sums = _running_sum(g, firsts, DOCUMENTS, False)
    total = tl.sum(tl.where(index[:, None] == last, sums, 0.0), axis=0)
    from_start = tl.exp2(sums.to(tl.float32))
    to_end = tl.exp2(tl.minimum(total[None, :] - sums, 0.0).to(tl.float32))
    through = tl.exp2(total.to(tl.float32))
    if DOCUMENTS:
        before = tl.load(documents_ptr - tl.minimum(start, 1))
        after = tl.load(documents_ptr + last)
        from_start = tl.where((document == before)[:, None], from_start, 0.0)
        to_end = tl.where((document == after)[:, None], to_end, 0.0)
        through = tl.where(before == after, through, 0.0)
    tl.store(sums_ptr + place, sums, mask=used)
    tl.store(from_start_ptr + place, from_start, mask=used)
    tl.store(to_end_ptr + place, to_end, mask=used)
    tl.store(through_ptr + (batch * heads + head) * chunks + chunk, through, mask=head < heads)


@triton.jit(do_not_specialize=["length", "chunks"])
def log_decay_gradient_kernel(
    inside_ptr, between_ptr, taken_ptr, given_ptr, crossing_ptr, documents_ptr, dg_ptr, length, heads, chunks,
    DOCUMENTS: tl.constexpr, BETWEEN: tl.constexpr, C: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """dg [B, T, H] of a chunk's token j, a sum over its document: of tokens t >= j, the net terms of pairs in the chunk
    (`inside` its pieces and `between` them) and the terms `taken` from before it; of tokens s < j, the terms `given`
    to tokens after it, all [B, H, chunks C]; and the terms `crossing` the chunk [B, H, chunks]."""
    batch, chunk, head, place = _program(heads, chunks, C, BLOCK_HEADS)
    index, start = tl.arange(0, C), chunk * C
    last = tl.minimum(length - start, C) - 1
    used = (head < heads)[None, :]
    follows, lasts = index > 0, index
    firsts = lasts
    if DOCUMENTS:
        documents_ptr += batch * length + start
        document = tl.load(documents_ptr + tl.minimum(index, last))
        follows = document == tl.load(documents_ptr + tl.minimum(tl.maximum(index - 1, 0), last))
        lasts = (document != tl.load(documents_ptr + tl.minimum(index + 1, last))).to(tl.int32)
        firsts = 1 - follows.to(tl.int32)
        follows &= index > 0
    taken = tl.load(inside_ptr + place, mask=used, other=0.0) + tl.load(taken_ptr + place, mask=used, other=0.0)
    if BETWEEN:
        taken += tl.load(between_ptr + place, mask=used, other=0.0)
    given = tl.load(given_ptr + place - 1, mask=used & follows[:, None], other=0.0)
    dg = _running_sum(taken, lasts, DOCUMENTS, True) + _running_sum(given, firsts, DOCUMENTS, False)
    dg += tl.load(crossing_ptr + (batch * heads + head) * chunks + chunk, mask=head < heads, other=0.0)[None, :]
    token = batch * length + start + index
    tl.store(dg_ptr + token[:, None] * heads + head[None, :], dg, mask=(index <= last)[:, None] & used)


@triton.jit
def pair_scores(
    q, k, sums_ptr, documents_ptr, length, start, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """k_s . q_t times the decay between a chunk's tokens s <= t (REVERSE: s >= t) of one document, else 0 [s, t]."""
    index = tl.arange(0, C)
    visible = index[:, None] >= index[None, :] if REVERSE else index[:, None] <= index[None, :]
    if DOCUMENTS:
        document = tl.load(documents_ptr + tl.minimum(start + index, length - 1))
        visible = visible & (document[:, None] == document[None, :])
    sums = tl.load(sums_ptr + index)
    between = sums[:, None] - sums[None, :] if REVERSE else sums[None, :] - sums[:, None]
    scores = tl.where(visible, tl.dot(k, tl.trans(q), input_precision=PRECISION), 0.0)
    return scores * tl.exp2(tl.minimum(between, 0.0).to(tl.float32))


class Decays(NamedTuple):
    """Decays of g [B, T, H] in chunks of C tokens."""

    sums: Tensor  # [B, H, chunks C] fp32, fp64 for kernels of fp32 tensors
    from_start: Tensor  # [B, H, chunks C] fp32
    to_end: Tensor  # [B, H, chunks C] fp32
    through: Tensor  # [B, H, chunks] fp32


class ScalarDecayTiles(NamedTuple):
    """Tile width of a kernel in value columns, and its launch options."""

    value: int
    warps: int
    stages: int


def power(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def chunk_of(dtype: torch.dtype) -> int:
    """Chunk size of the scans. In bf16 two programs fit an SM with four stages of 32 tokens, with two of 64."""
    return 32 if dtype == torch.bfloat16 else 16


def gradient_chunk_of(key: int, dtype: torch.dtype) -> int:
    """Chunk size of the kernels that compute dq and dk, a multiple of the scans'."""
    return 128 if dtype == torch.bfloat16 and key <= 128 else chunk_of(dtype)


def _numbers(dtype: torch.dtype) -> dict[str, object]:
    """Matmul operands: bf16 for bf16; for fp32, and fp16, whose range the states exceed, three bf16 terms each. These
    need half the steps of three tf32 matmuls; at each step tensor cores truncate the accumulator, not round it."""
    if dtype == torch.bfloat16:
        return {"OPERAND": tl.bfloat16, "PRECISION": "ieee"}
    return {"OPERAND": tl.float32, "PRECISION": "bf16x6"}


def constants(
    kernel: Any, key: int, value: int, dtype: torch.dtype, tiles: ScalarDecayTiles, chunk: int
) -> dict[str, Any]:
    """Constants that `kernel` takes, and its launch options."""
    found = {
        "KEY": key,
        "VALUE": value,
        "C": chunk,
        "PIECE": min(chunk, 64),
        "RATIO": gradient_chunk_of(key, dtype) // chunk,
        "BLOCK_KEY": power(key),
        "BLOCK_VALUE": tiles.value,
        "STAGES": tiles.stages,
    }
    found = {name: x for name, x in (found | _numbers(dtype)).items() if name in kernel.arg_names}
    return found | {"num_warps": tiles.warps, "num_stages": tiles.stages}


def _block_heads(heads: int) -> int:
    return min(16, triton.next_power_of_2(heads))


def empty_decays(g: Tensor, chunk: int, *, exact: bool) -> Decays:
    """Uninitialised Decays; arguments as in `decays`."""
    batch, length, heads = g.shape
    chunks = triton.cdiv(length, chunk)
    sums = g.new_empty(batch, heads, chunks * chunk, dtype=torch.float64 if exact else torch.float32)
    return Decays(sums, *(g.new_empty(sums.shape) for _ in range(2)), g.new_empty(batch, heads, chunks))


def decays(g: Tensor, documents: Tensor | None, chunk: int, *, exact: bool) -> Decays:
    """Decays of g [B, T, H] fp32 and documents [B, T], contiguous; `exact`: sums in fp64."""
    batch, length, heads = g.shape
    found = empty_decays(g, chunk, exact=exact)
    chunks, block = found.through.shape[2], _block_heads(heads)
    decays_kernel[batch * triton.cdiv(heads, block), chunks](
        g, documents, *found, length, heads, chunks, DOCUMENTS=documents is not None, C=chunk,
        BLOCK_HEADS=block, SUM=tl.float64 if exact else tl.float32, num_warps=4,
    )  # fmt: skip
    return found


def log_decay_gradient(
    inside: Tensor,
    between: Tensor | None,
    taken: Tensor,
    given: Tensor,
    crossing: Tensor,
    documents: Tensor | None,
    length: int,
    chunk: int,
) -> Tensor:
    """dg [B, T, H] from inside, between, taken, given [B, H, chunks C] and crossing [B, H, chunks]."""
    batch, heads, chunks = crossing.shape
    block = _block_heads(heads)
    dg = crossing.new_empty(batch, length, heads)
    log_decay_gradient_kernel[batch * triton.cdiv(heads, block), chunks](
        inside, between, taken, given, crossing, documents, dg, length, heads, chunks,
        DOCUMENTS=documents is not None, BETWEEN=between is not None, C=chunk, BLOCK_HEADS=block, num_warps=4,
    )  # fmt: skip
    return dg
