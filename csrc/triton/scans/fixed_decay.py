"""Linear recurrence with a fixed scalar decay per head or none: one scan kernel computes o, dq, dk and dv.

    o_t = sum_{j <= t} e^{-s (t - j)} (q_t . k_j) v_j + e^{-s (t + 1)} S_0^T q_t

    dq = scan(do, v, k) with the states transposed,    dk = scan(v, do, q), dv = scan(k, q, do) from the end

A sequence is cut into blocks, as many as fill the GPU. A program loops over the chunks of C tokens of a block with the
state in registers. The states entering blocks are computed first: the update of each part of a block
(block_state_kernel), accumulated over the parts (fold_kernel). A reverse scan swaps two factors of every token: the
decay from the start of its chunk, e^{-s (i + 1)}, and to the end of its chunk, e^{-s (n - 1 - i)}.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.tiles import aligned, tiled
from megalin._triton.dispatch.tuning import choose
from megalin._triton.scans.fixed_decay_sweep import block_state_kernel, fold_kernel, scan_kernel


class FixedDecayTiles(NamedTuple):
    """Tile sizes and launch options of a kernel; `value`: columns of v per program."""

    chunk: int
    value: int
    warps: int
    stages: int


PROGRAMS = 264
"""Programs of scan_kernel that fill the GPU: two on each of 132 SMs; block_state_kernel launches twice as many."""


def _tiles(key: int, value: int, dtype: torch.dtype) -> FixedDecayTiles:
    """Tiles of scan_kernel."""
    if dtype != torch.bfloat16:
        return FixedDecayTiles(chunk=32, value=32, warps=4, stages=1)
    width = min(64, max(16, triton.next_power_of_2(value)))
    if key > 128:
        return FixedDecayTiles(chunk=32, value=width, warps=4, stages=2)
    return FixedDecayTiles(chunk=64, value=width, warps=4, stages=3)


def _candidates(key: int, value: int, dtype: torch.dtype) -> list[FixedDecayTiles]:
    """Candidate tiles of scan_kernel on GPUs without a measured table, the least demanding first."""
    width = min(64, max(16, triton.next_power_of_2(value)))
    least = 16 if dtype != torch.bfloat16 and key > 128 else 32
    found = [FixedDecayTiles(chunk=least, value=min(width, least), warps=4, stages=1)]
    if dtype == torch.bfloat16:
        found.append(FixedDecayTiles(chunk=32, value=width, warps=4, stages=2))
        if key <= 128:  # wider tiles of more keys spill kilobytes, and take minutes to compile
            found += [
                FixedDecayTiles(chunk=64, value=width, warps=8, stages=2),
                FixedDecayTiles(chunk=64, value=width, warps=4, stages=3),
            ]
    return found


def state_tiles(key: int, value: int, dtype: torch.dtype) -> FixedDecayTiles:
    """Tiles of block_state_kernel."""
    if dtype != torch.bfloat16:
        return _tiles(key, value, dtype)
    width = min(64, max(16, triton.next_power_of_2(value)))
    return FixedDecayTiles(chunk=64, value=width, warps=4 if key <= 128 else 8, stages=2)


def num_blocks(rows: int) -> int:
    """Maximum number of blocks of a sequence, for `rows` = batch x heads; independent of the length."""
    return max(1, PROGRAMS // (2 * rows))


def num_parts(rows: int, slots: int) -> int:
    """Number of parts of a block whose states are computed in parallel."""
    return 1 if slots == 1 else min(4, max(1, PROGRAMS // (rows * max(1, slots - 1))))


def _block_tokens(length: int, slots: int, parts: int) -> int:
    return triton.cdiv(triton.cdiv(length, slots), 64 * parts) * 64 * parts if slots > 1 else length


def numbers(dtype: torch.dtype) -> dict[str, object]:
    """Matmul operands: bf16 for bf16; fp32 for fp32, and for fp16, whose range the states exceed."""
    if dtype == torch.bfloat16:
        return {"OPERAND": tl.bfloat16, "PRECISION": "ieee"}
    return {"OPERAND": tl.float32, "PRECISION": "tf32x3"}


class LaunchSequence(NamedTuple):
    """Arguments common to the launches of one op."""

    slopes: Tensor | None  # [H] fp32
    documents: Tensor | None  # [B, T]
    length: int
    heads: int
    slots: int
    parts: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.length, self.block_tokens)

    def num_parts(self, *, last: bool) -> int:
        """Number of parts whose state updates are needed, skipped ones included."""
        return 0 if self.blocks == 1 and not last else self.blocks * self.parts

    def parts_of(self, k: Tensor, v: Tensor, *, reverse: bool, last: bool) -> Tensor:
        """State update of each part [B, H, parts, K, V] fp32; parts of the last block in scan direction are skipped
        unless `last`."""
        batch, key, value = k.shape[0], k.shape[3], v.shape[3]
        total, skipped = self.num_parts(last=last), 0 if last else self.parts
        added = k.new_empty(batch, self.heads, total, key, value, dtype=torch.float32)
        if total == 0:
            return added
        tiles, width = state_tiles(key, value, v.dtype), max(16, triton.next_power_of_2(key))
        block_state_kernel[batch * self.heads * triton.cdiv(value, tiles.value), total - skipped](
            tiled(k, tiles.chunk, width), tiled(v, tiles.chunk, tiles.value), self.slopes, self.documents, added,
            self.length, self.heads, total, self.block_tokens // self.parts, skipped if reverse else 0, KEY=key,
            VALUE=value, DECAY=self.slopes is not None, DOCUMENTS=self.documents is not None, REVERSE=reverse,
            C=tiles.chunk, BLOCK_KEY=width, BLOCK_VALUE=tiles.value, **numbers(v.dtype), num_warps=tiles.warps,
            num_stages=tiles.stages,
        )  # fmt: skip
        return added

    def states(self, parts: Tensor, boundary: Tensor | None, *, reverse: bool) -> Tensor | None:
        """States entering the blocks [B, H, slots, K, V] fp32; for one block `boundary` [B, H, K, V]."""
        if self.blocks == 1:
            return boundary
        batch, heads, _, *sizes = parts.shape
        states = parts.new_empty(batch, heads, self.slots, *sizes)
        self._fold(parts, states, boundary, reverse=reverse, whole=False)
        return states

    def total(self, parts: Tensor, *, reverse: bool) -> Tensor:
        """State update of all parts together, [B, H, K, V] fp32."""
        total = torch.empty_like(parts[:, :, 0])
        self._fold(parts, total, None, reverse=reverse, whole=True)
        return total

    def _fold(self, parts: Tensor, states: Tensor, boundary: Tensor | None, *, reverse: bool, whole: bool) -> None:
        batch, heads, _, key, value = parts.shape
        fold_kernel[batch * heads * triton.cdiv(key * value, 1024),](
            parts, states, boundary, self.slopes, self.documents, self.length, self.heads, self.slots, self.blocks,
            self.block_tokens // self.parts, SIZE=key * value, DECAY=self.slopes is not None,
            DOCUMENTS=self.documents is not None, REVERSE=reverse, BOUNDARY=boundary is not None, WHOLE=whole,
            PARTS=self.parts, BLOCK=1024, num_warps=4,
        )  # fmt: skip

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        states: Tensor | None,
        leaving: Tensor | None,
        *,
        reverse: bool = False,
        transposed: bool = False,
    ) -> Tensor:
        """Launches scan_kernel; returns scan(q, k, v) like v, contiguous."""
        batch, key, value = k.shape[0], k.shape[3], v.shape[3]
        o = v.new_empty(v.shape)
        width = max(16, triton.next_power_of_2(key))

        def launch(tiles: FixedDecayTiles) -> Tensor:
            scan_kernel[batch * self.heads * triton.cdiv(value, tiles.value), self.blocks](
                *(tiled(x, tiles.chunk, width) for x in (q, k)), *(tiled(x, tiles.chunk, tiles.value) for x in (v, o)),
                self.slopes, self.documents, states, leaving, self.length, self.heads,
                1 if self.blocks == 1 else self.slots, self.block_tokens, KEY=key, VALUE=value,
                DECAY=self.slopes is not None, DOCUMENTS=self.documents is not None, REVERSE=reverse,
                TRANSPOSED=transposed, ENTERING=states is not None, LEAVING=leaving is not None, C=tiles.chunk,
                BLOCK_KEY=width, BLOCK_VALUE=tiles.value, **numbers(v.dtype), num_warps=tiles.warps,
                num_stages=tiles.stages,
            )  # fmt: skip
            return o

        recorded, shape = _tiles(key, value, v.dtype), f"{width} {triton.next_power_of_2(value)} {v.dtype}"
        return launch(choose("decay_scan", shape, recorded, _candidates(key, value, v.dtype), launch))


def _sequence(shape: torch.Size, slopes: Tensor | None, documents: Tensor | None) -> LaunchSequence:
    batch, length, heads = shape[:3]
    slots = num_blocks(batch * heads)
    parts = num_parts(batch * heads, slots)
    return LaunchSequence(slopes, documents, length, heads, slots, parts, _block_tokens(length, slots, parts))


def saved_shape(batch: int, length: int, heads: int, key: int, value: int) -> tuple[int, int, int, int, int]:
    """Shape [B, H, slots, K, V] of the states saved for backward; slots is 0 for one block."""
    sequence = _sequence(torch.Size((batch, length, heads)), None, None)
    return batch, heads, sequence.slots if sequence.blocks > 1 else 0, key, value


def parts_shape(
    batch: int, length: int, heads: int, key: int, value: int, *, reverse: bool, total: bool
) -> tuple[int, int, int, int, int]:
    """Shape [B, H, parts, K, V] of the state updates that `begin` returns."""
    sequence = _sequence(torch.Size((batch, length, heads)), None, None)
    return batch, heads, sequence.num_parts(last=total), key, value


def begin(
    k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None, *, reverse: bool, total: bool
) -> tuple[Tensor, Tensor]:
    """First phase: the state update of all tokens [B, H, K, V] fp32, empty unless `total`, and that of each part, for
    `finish`. `reverse`, with q and do as k and v: the updates of the state's gradient, for `finish_backward`."""
    sequence = _sequence(k.shape, slopes, documents)
    parts = sequence.parts_of(aligned(k), aligned(v), reverse=reverse, last=total)
    return sequence.total(parts, reverse=reverse) if total else parts.new_empty(0), parts


def finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    entering: Tensor | None,
    documents: Tensor | None,
    parts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase: q, k [B, T, H, K], v [B, T, H, V], slopes [H] and entering [B, H, K, V] fp32, documents [B, T],
    `parts` from `begin` -> o, the final state, and the states entering blocks, of `saved_shape`."""
    sequence = _sequence(k.shape, slopes, documents)
    q, k, v = aligned(q), aligned(k), aligned(v)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    states = sequence.states(parts, entering, reverse=False)
    leaving = k.new_empty(batch, heads, key, value, dtype=torch.float32)
    o = sequence.scan(q, k, v, states, leaving)
    if states is None or sequence.blocks == 1:
        states = leaving.new_empty(saved_shape(batch, length, heads, key, value))
    return o, leaving, states


def finish_backward(
    do: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    entering: Tensor | None,
    documents: Tensor | None,
    states: Tensor,
    parts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Second phase of the backward: dq, dk, dv, and the gradient [B, H, K, V] fp32 of `entering`; `states` from
    `finish`, `parts` from `begin`."""
    sequence = _sequence(k.shape, slopes, documents)
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    dq = sequence.scan(do, v, k, entering if sequence.blocks == 1 else states, None, transposed=True)
    gradients = sequence.states(parts, d_leaving, reverse=True)
    d_entering = k.new_empty(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    dk = sequence.scan(v, do, q, gradients, None, reverse=True, transposed=True)
    dv = sequence.scan(k, q, do, gradients, d_entering, reverse=True)
    return dq, dk, dv, d_entering
