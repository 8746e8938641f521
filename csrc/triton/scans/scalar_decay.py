"""Linear recurrence with a data-dependent scalar decay per token and head (Mamba-2), with states in registers.

    S_t = e^{g_t} S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t

A sequence is cut into blocks, as many as fill the GPU. A program loops over the chunks of C tokens of a block with the
state in registers. The states entering blocks are computed first: the update of each part of a block (state_kernel),
accumulated over the parts (fold_kernel). dv = scan(k, q, do) in reverse, with the decays from a chunk's start and to
its end swapped. scalar_decay_gradient.py computes dq, dk and dg from recomputed states between chunks, of both
directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
from megalin._triton.dispatch.chips import has_tensor_memory
from megalin._triton.dispatch.tiles import aligned, tiled
from megalin._triton.scans.scalar_decay_chunk import (
    Decays,
    ScalarDecayTiles,
    chunk_of,
    constants,
    decays,
    empty_decays,
    gradient_chunk_of,
    power,
)
from megalin._triton.scans.scalar_decay_gradient import key_gradients
from megalin._triton.scans.scalar_decay_sweep import fold_kernel, scan_kernel, state_kernel, total_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

PROGRAMS = 264
"""Programs of scan_kernel that fill the GPU: two on each of 132 SMs; state_kernel launches twice as many."""


def _state_tiles(key: int, value: int, dtype: torch.dtype) -> ScalarDecayTiles:
    """Tiles of state_kernel over chunks of scans."""
    if dtype != torch.bfloat16:
        return ScalarDecayTiles(min(32, power(value)), 4, 1)
    return ScalarDecayTiles(min(64, power(value)), 4, 3 if key <= 128 else 2)


def _wide_state_tiles(key: int, value: int, dtype: torch.dtype) -> ScalarDecayTiles:
    """Tiles of state_kernel over chunks of gradients."""
    tiles = _state_tiles(key, value, dtype)
    return tiles._replace(stages=1) if has_tensor_memory() else tiles


def _tiles(key: int, value: int, dtype: torch.dtype) -> ScalarDecayTiles:
    """Tiles of scan_kernel."""
    if dtype != torch.bfloat16:
        return ScalarDecayTiles(min(32, power(value)), 8, 1)
    return ScalarDecayTiles(min(64, power(value)), 4, 4 if key <= 128 else 2)


def _num_slots(rows: int) -> int:
    """Maximum number of blocks of a sequence, for `rows` = batch x heads; independent of the length."""
    return max(1, PROGRAMS // rows)


def _num_parts(rows: int, slots: int) -> int:
    """Number of parts of a block whose states are computed in parallel."""
    return min(4, max(1, 2 * PROGRAMS // (rows * max(1, slots - 1))))


def _part_tokens(length: int, slots: int, parts: int) -> int:
    return triton.cdiv(triton.cdiv(length, slots), parts * 128) * 128 if slots > 1 else length


class Parts(NamedTuple):
    """State update of each part of a sequence [B, H, parts, K, V], and the decay through it [B, H, parts]."""

    added: Tensor
    passed: Tensor

    def total(self, *, reverse: bool) -> tuple[Tensor, Tensor]:
        """State update and decay of all parts together: [B, H, K, V] and [B, H]."""
        batch, heads, parts, key, value = self.added.shape
        added, passed = self.added.new_empty(batch, heads, key, value), self.passed.new_empty(batch, heads)
        total_kernel[batch * heads * triton.cdiv(key * value, 1024),](
            *self, added, passed, parts, SIZE=key * value, REVERSE=reverse, BLOCK=1024, num_warps=4
        )
        return added, passed


class ScalarScan(NamedTuple):
    """Arguments common to the launches of one op; a block is `parts` parts of `part_chunks` chunks."""

    decays: Decays
    documents: Tensor | None  # [B, T]
    length: int
    chunk: int
    slots: int
    parts: int
    part_chunks: int

    @property
    def chunks(self) -> int:
        return self.decays.through.shape[2]

    @property
    def block_chunks(self) -> int:
        return self.part_chunks * self.parts

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.chunks, self.block_chunks)

    def factors(self, *, reverse: bool) -> tuple[Tensor, Tensor]:
        """Decays from the start and to the end of a chunk, in scan direction."""
        pair = self.decays.from_start, self.decays.to_end
        return pair[::-1] if reverse else pair

    def tiled(self, *tensors: Tensor, width: int) -> list[TensorDescriptor]:
        return [tiled(x, self.chunk, width) for x in tensors]

    def empty_parts(self, k: Tensor, v: Tensor, *, last: bool) -> Parts:
        """Uninitialised Parts of all blocks; unless `last` none of a single block."""
        (batch, _, heads, value), key = v.shape, k.shape[3]
        parts = 0 if self.blocks == 1 and not last else self.blocks * self.parts
        added = v.new_empty(batch, heads, parts, key, value, dtype=torch.float32)
        return Parts(added, added.new_empty(batch, heads, parts))

    def sums(self, k: Tensor, v: Tensor, *, reverse: bool, last: bool) -> Parts:
        """State updates of the parts; parts of the last block in scan direction are skipped unless `last`."""
        found = self.empty_parts(k, v, last=last)
        parts, key, value, skipped = found.added.shape[2], k.shape[3], v.shape[3], 0 if last else self.parts
        if parts == 0:
            return found
        tiles = _state_tiles(key, value, v.dtype)
        self._launch(k, v, tiles, parts - skipped, None, None, found, skipped if reverse else 0, reverse=reverse)
        return found

    def keep(self, k: Tensor, v: Tensor, entering: Tensor | None, kept: Tensor) -> None:
        """Writes the states entering chunks to `kept`, from the states `entering` the blocks."""
        key, value = k.shape[3], v.shape[3]
        tiles = _wide_state_tiles(key, value, v.dtype)
        states = TensorDescriptor.from_tensor(kept, [1, tiles.value, power(key)])
        self._launch(k, v, tiles, self.blocks, entering, states, None, 0, reverse=False)

    def _launch(
        self,
        k: Tensor,
        v: Tensor,
        tiles: ScalarDecayTiles,
        programs: int,
        entering: Tensor | None,
        states: TensorDescriptor | None,
        found: Parts | None,
        skipped: int,
        *,
        reverse: bool,
    ) -> None:
        """Launches state_kernel over parts if `found` is given, else over blocks, saving the states of chunks."""
        (batch, _, heads, value), (key_heads, key) = v.shape, k.shape[2:]
        parts, part_chunks = (1 if self.blocks == 1 else self.slots), self.block_chunks
        if found is not None:
            parts, part_chunks = self.blocks * self.parts, self.part_chunks
        rows = min(self.chunk, 64)
        state_kernel[batch * heads * triton.cdiv(value, tiles.value), programs](
            tiled(k, rows, power(key)), tiled(v, rows, tiles.value), self.factors(reverse=reverse)[1],
            self.decays.through, entering, states, *(found or (None, None)), heads, heads // key_heads, self.chunks,
            parts, part_chunks, skipped, REVERSE=reverse, ENTERING=entering is not None, KEPT=found is None,
            **constants(state_kernel, key, value, v.dtype, tiles, rows) | {"RATIO": self.chunk // rows},
        )  # fmt: skip

    def entering(self, found: Parts, boundary: Tensor | None, *, reverse: bool) -> Tensor | None:
        """States entering the blocks [B, H, slots, K, V] fp32; for one block `boundary` [B, H, K, V]."""
        if self.blocks == 1:
            return boundary
        batch, heads, _, key, value = found.added.shape
        states = found.added.new_empty(batch, heads, self.slots, key, value)
        fold_kernel[batch * heads * triton.cdiv(key * value, 1024),](
            *found, boundary, states, self.slots, self.blocks, SIZE=key * value, REVERSE=reverse,
            BOUNDARY=boundary is not None, PARTS=self.parts, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        return states

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, entering: Tensor | None, *, reverse: bool, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Launches scan_kernel; returns o like v, contiguous, and the state after the last block."""
        (batch, _, heads, value), (key_heads, key) = v.shape, k.shape[2:]
        o = v.new_empty(v.shape)
        leaving = v.new_empty(batch, heads, key, value, dtype=torch.float32)
        tiles = _tiles(key, value, v.dtype)
        states = None if kept is None else TensorDescriptor.from_tensor(kept, [1, tiles.value, power(key)])
        scan_kernel[batch * heads * triton.cdiv(value, tiles.value), self.blocks](
            *self.tiled(q, k, width=power(key)), *self.tiled(v, o, width=tiles.value), self.decays.sums,
            *self.factors(reverse=reverse), self.decays.through, self.documents, entering, states, leaving, self.length,
            heads, heads // key_heads, self.chunks, 1 if self.blocks == 1 else self.slots, self.block_chunks,
            DOCUMENTS=self.documents is not None, REVERSE=reverse, ENTERING=entering is not None,
            KEPT=kept is not None, **constants(scan_kernel, key, value, v.dtype, tiles, self.chunk),
        )  # fmt: skip
        return o, leaving


def _cut(v: Tensor) -> tuple[int, int, int]:
    """Maximum number of blocks, parts per block, tokens per part."""
    batch, length, heads = v.shape[:3]
    slots = _num_slots(batch * heads)
    parts = _num_parts(batch * heads, slots)
    return slots, parts, _part_tokens(length, slots, parts)


def _scan(v: Tensor, found: Decays, documents: Tensor | None, chunk: int) -> ScalarScan:
    slots, parts, part_tokens = _cut(v)
    return ScalarScan(found, documents, v.shape[1], chunk, slots, parts, triton.cdiv(part_tokens, chunk))


def _decays(k: Tensor, v: Tensor, g: Tensor, documents: Tensor | None) -> Decays:
    return decays(g, documents, chunk_of(v.dtype), exact=v.dtype == torch.float32)


def saved_shape(k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """Shape [B, H, slots, K, V] of the states saved for backward; slots is 0 for one block."""
    slots, parts, part_tokens = _cut(v)
    return v.shape[0], v.shape[2], slots if v.shape[1] > parts * part_tokens else 0, k.shape[3], v.shape[3]


def empty_intermediates(k: Tensor, v: Tensor, g: Tensor, *, total: bool) -> tuple[Decays, Parts]:
    """Uninitialised Decays and Parts as `begin` returns them, for fake kernels."""
    chunk = chunk_of(v.dtype)
    scan = _scan(v, empty_decays(g, chunk, exact=v.dtype == torch.float32), None, chunk)
    return scan.decays, scan.empty_parts(k, v, last=total)


def begin(
    k: Tensor, v: Tensor, g: Tensor, documents: Tensor | None, *, reverse: bool, total: bool
) -> tuple[Tensor, Tensor, Decays, Parts]:
    """First phase, from v [B, T, H, V], k [B, T, H or 1, K], and contiguous g [B, T, H] fp32 and documents [B, T]:
    the final state from zero [B, H, K, V] and the total decay [B, H], empty unless `total`, and inputs of `finish`.
    `reverse`, with q and do as k and v: the output's contribution to the gradient of the initial state, and inputs of
    `finish_backward`."""
    k, v = aligned(k), aligned(v)
    found = _decays(k, v, g, documents)
    parts = _scan(v, found, documents, chunk_of(v.dtype)).sums(k, v, reverse=reverse, last=total)
    sums = parts.total(reverse=reverse) if total else (g.new_empty(0), g.new_empty(0))
    return *sums, found, parts


def finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entering: Tensor | None,
    documents: Tensor | None,
    found: Decays,
    parts: Parts,
) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase, from entering [B, H, K, V] fp32: o like v, the final state, and the states entering blocks, of
    `saved_shape`."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    scan = _scan(v, found, documents, chunk_of(v.dtype))
    states = scan.entering(parts, entering, reverse=False)
    o, leaving = scan.scan(q, k, v, states, reverse=False)
    saved = states if states is not None and scan.blocks > 1 else leaving.new_empty(saved_shape(k, v))
    return o, leaving, saved


def finish_backward(
    do: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    entering: Tensor | None,
    documents: Tensor | None,
    saved: Tensor,
    found: Decays,
    parts: Parts,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Second phase of the backward: dq, dk, dv, dg, and the gradient of `entering`; `saved` from `finish`. `exact`:
    computes dg from the entering state and the gradient of the final state in fp32, not rounded like those between
    chunks, which takes half as long again."""
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    key = k.shape[3]
    scan = _scan(v, found, documents, chunk_of(v.dtype))
    chunk, wide = gradient_chunk_of(key, v.dtype), scan
    if chunk != scan.chunk:
        wide = _scan(v, decays(g, documents, chunk, exact=v.dtype == torch.float32), documents, chunk)
    kept = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    states = v.new_empty(v.shape[0] * v.shape[2] * wide.chunks, v.shape[3], key, dtype=kept)
    gradients = torch.empty_like(states)
    wide.keep(k, v, entering if scan.blocks == 1 else saved, states)
    between = scan.entering(parts, d_leaving, reverse=True)
    dv, d_entering = scan.scan(k, q, do, between, reverse=True, kept=gradients)
    boundaries = (entering, d_leaving) if exact else (None, None)
    dq, dk, dg = key_gradients(q, k, v, do, wide.decays, documents, (states, gradients), boundaries)
    return dq, dk, dv, dg, d_entering
