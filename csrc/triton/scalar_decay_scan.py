"""Linear recurrence with a data-dependent scalar decay a token and head (Mamba-2): states pass along in registers.

    S_t = e^{g_t} S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t

A sequence is cut into blocks, as many as fill the chip. A block goes over its chunks of C tokens with its state in
registers; the states that enter blocks are formed first: what each part of a block adds (state_kernel), folded over
the parts (fold_kernel). dv = scan(k, q, do) from the end, where decays from a chunk's start and to its end swap.
From the states between the chunks of both directions, formed again, scalar_decay_gradient.py sums dq, dk and dg.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.scalar_decay_gradient import key_gradients
from megalin._triton.scalar_decays import (
    Decays,
    Tiles,
    chunk_of,
    constants,
    decays,
    gradient_chunk_of,
    launches,
    pair_decay,
    power,
)
from megalin._triton.tiles import aligned, tiled
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _row_and_column(VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr):
    """batch x head, and the first value column."""
    program, tiles = tl.program_id(0), tl.cdiv(VALUE, BLOCK_VALUE)
    return program // tiles, program % tiles * BLOCK_VALUE


@triton.jit(do_not_specialize=["length", "chunks", "part_chunks", "skipped"])
def state_kernel(
    k_tiles, v_tiles, weight_ptr, through_ptr, entering_ptr, state_tiles, added_ptr, passed_ptr,
    heads, group, chunks, parts, part_chunks, skipped,
    KEY: tl.constexpr, VALUE: tl.constexpr, REVERSE: tl.constexpr, ENTERING: tl.constexpr, KEPT: tl.constexpr,
    C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state over a part's chunks, `weight` the decay to a chunk's end (REVERSE: from its start). KEPT: the states
    that enter chunks go to `state_tiles` [B H chunks, VALUE, KEY], from those entering parts [B H, parts, KEY, VALUE].
    Else what a part adds goes to `added` [B H, parts, KEY, VALUE], the decay through it to `passed` [B H, parts]."""
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
    for i in range(0, count):
        chunk = first + (count - 1 - i if REVERSE else i)
        if KEPT:
            kept = state.to(OPERAND).reshape([1, BLOCK_VALUE, BLOCK_KEY])
            state_tiles.store([(row * chunks + chunk).to(tl.int32), column, 0], kept)
        k = k_tiles.load([batch, head // group, chunk * C, 0]).reshape([C, BLOCK_KEY]).to(OPERAND)
        v = v_tiles.load([batch, head, chunk * C, column]).reshape([C, BLOCK_VALUE]).to(tl.float32)
        weight = tl.load(weight_ptr + (row * chunks + chunk) * C + tl.arange(0, C))
        through = tl.load(through_ptr + row * chunks + chunk)
        weighted = (v * weight[:, None]).to(OPERAND)
        state = tl.dot(tl.trans(weighted), k, state * through, input_precision=PRECISION)
        passed *= through
    if not KEPT:
        tl.store(added_ptr + offset, state, mask=inside)
        tl.store(passed_ptr + row * parts + part, passed)


@triton.jit(do_not_specialize=["parts"])
def fold_kernel(
    added_ptr, passed_ptr, boundary_ptr, states_ptr, slots, blocks,
    SIZE: tl.constexpr, REVERSE: tl.constexpr, BOUNDARY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each part adds, PARTS a block -> states [rows, slots, SIZE] that enter the blocks; `boundary` [rows, SIZE]
    enters the first (the last, where REVERSE)."""
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


@triton.jit(do_not_specialize=["length", "chunks", "block_chunks"])
def scan_kernel(
    q_tiles, k_tiles, v_tiles, o_tiles, sums_ptr, from_start_ptr, to_end_ptr, through_ptr, documents_ptr,
    entering_ptr, state_tiles, leaving_ptr, length, heads, group, chunks, slots, block_chunks,
    KEY: tl.constexpr, VALUE: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr, ENTERING: tl.constexpr,
    KEPT: tl.constexpr, RATIO: tl.constexpr, C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o from q, k [B, T, H / group, KEY], v [B, T, H, VALUE] and the states entering each block [B H, slots, KEY,
    VALUE]; the state after the last block goes to `leaving`. REVERSE: from the end, `from_start` and `to_end` given
    in each other's place. KEPT, from the end: the states that enter runs of RATIO chunks go to `state_tiles`
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
    for i in range(0, count):
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
        decay = pair_decay(sums_ptr + place * C, documents_ptr, length, start, DOCUMENTS, REVERSE, C)
        through = tl.load(through_ptr + place)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * decay
        o = tl.dot(state.to(OPERAND), tl.trans(q), input_precision=PRECISION) * from_start[None, :]
        o = tl.dot(tl.trans(v), scores.to(OPERAND), o, input_precision=PRECISION)
        weighted = (v.to(tl.float32) * to_end[:, None]).to(OPERAND)
        state = tl.dot(tl.trans(weighted), k, state * through, input_precision=PRECISION)
        o_tiles.store([batch, head, start, column], tl.trans(o.to(o_tiles.dtype)).reshape([1, 1, C, BLOCK_VALUE]))
    if block == (0 if REVERSE else tl.num_programs(1) - 1):
        tl.store(leaving_ptr + row * KEY * VALUE + offset, state, mask=inside)


PROGRAMS = 264
"""Programs of scan_kernel that fill the chip: 132 processors, two each; of state_kernel twice as many."""


def _state_tiles(key: int, value: int, dtype: torch.dtype) -> Tiles:
    """Of state_kernel over chunks of scans."""
    if dtype != torch.bfloat16:
        return Tiles(min(32, power(value)), 4, 1)
    return Tiles(min(64, power(value)), 4, 3 if key <= 128 else 2)


def _wide_state_tiles(key: int, value: int, dtype: torch.dtype) -> Tiles:
    """Of state_kernel over chunks of gradients."""
    tiles = _state_tiles(key, value, dtype)
    return tiles._replace(stages=min(2, tiles.stages))


def _tiles(key: int, value: int, dtype: torch.dtype) -> Tiles:
    """Of scan_kernel."""
    if dtype != torch.bfloat16:
        return Tiles(min(32, power(value)), 8, 1)
    return Tiles(min(64, power(value)), 4, 2)


def _num_slots(rows: int) -> int:
    """Blocks into which a sequence is cut, for `rows` = batch x heads; independent of its length."""
    return max(1, PROGRAMS // rows)


def _num_parts(rows: int, slots: int) -> int:
    """Parts of a block that form their states side by side."""
    return min(4, max(1, 2 * PROGRAMS // (rows * max(1, slots - 1))))


def _part_tokens(length: int, slots: int, parts: int) -> int:
    return triton.cdiv(triton.cdiv(length, slots), parts * 128) * 128 if slots > 1 else length


class Scan(NamedTuple):
    """What the launches of one op share: blocks of `parts` parts of `part_chunks` chunks."""

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
        """Decays from the start and to the end of a chunk, in the direction of a scan."""
        pair = self.decays.from_start, self.decays.to_end
        return pair[::-1] if reverse else pair

    def tiled(self, *tensors: Tensor, width: int) -> list[TensorDescriptor]:
        return [tiled(x, self.chunk, width) for x in tensors]

    def states(
        self,
        k: Tensor,
        v: Tensor,
        entering: Tensor | None,
        *,
        reverse: bool = False,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """What each part adds [B, H, parts, K, V] and its decay [B, H, parts], but for the last part to be passed.

        With `kept`: nothing; the states that enter chunks go there, from those `entering` the blocks.
        """
        (batch, _, heads, value), (key_heads, key) = v.shape, k.shape[2:]
        tiles, added, passed, states = _state_tiles(key, value, v.dtype), None, None, None
        parts, part_chunks, skipped = self.blocks * self.parts, self.part_chunks, self.parts
        programs = batch * heads * triton.cdiv(value, tiles.value)
        if kept is None:
            added = v.new_empty(batch, heads, parts, key, value, dtype=torch.float32)
            passed = added.new_empty(batch, heads, parts)
        else:
            tiles = _wide_state_tiles(key, value, v.dtype)
            states, skipped = TensorDescriptor.from_tensor(kept, [1, tiles.value, power(key)]), 0
            parts, part_chunks = 1 if self.blocks == 1 else self.slots, self.block_chunks
        state_kernel[programs, self.blocks if kept is not None else parts - skipped](
            *self.tiled(k, width=power(key)), *self.tiled(v, width=tiles.value), self.factors(reverse=reverse)[1],
            self.decays.through, entering, states, added, passed, heads, heads // key_heads, self.chunks, parts,
            part_chunks, skipped if reverse else 0, REVERSE=reverse, ENTERING=entering is not None,
            KEPT=kept is not None, **constants(state_kernel, key, value, v.dtype, tiles, self.chunk),
        )  # fmt: skip
        return None if added is None else (added, passed)

    def entering(self, k: Tensor, v: Tensor, boundary: Tensor | None, *, reverse: bool) -> Tensor | None:
        """States entering the blocks [B, H, slots, K, V] fp32; `boundary` [B, H, K, V] itself for one block."""
        if self.blocks == 1:
            return boundary
        (batch, _, heads, value), key = v.shape, k.shape[3]
        added, passed = self.states(k, v, None, reverse=reverse)
        states = v.new_empty(batch, heads, self.slots, key, value, dtype=torch.float32)
        fold_kernel[batch * heads * triton.cdiv(key * value, 1024),](
            added, passed, boundary, states, self.slots, self.blocks, SIZE=key * value, REVERSE=reverse,
            BOUNDARY=boundary is not None, PARTS=self.parts, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        return states

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, entering: Tensor | None, *, reverse: bool, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """o like v, contiguous, and the state after the last block."""
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
    """Slots for blocks, parts of a block, tokens of a part."""
    batch, length, heads = v.shape[:3]
    slots = _num_slots(batch * heads)
    parts = _num_parts(batch * heads, slots)
    return slots, parts, _part_tokens(length, slots, parts)


def _scan(v: Tensor, g: Tensor, documents: Tensor | None, chunk: int) -> Scan:
    slots, parts, part_tokens = _cut(v)
    found = decays(g, documents, chunk, exact=v.dtype == torch.float32)
    return Scan(found, documents, v.shape[1], chunk, slots, parts, triton.cdiv(part_tokens, chunk))


def saved_shape(k: Tensor, v: Tensor) -> tuple[int, int, int, int, int]:
    """[B, H, slots, K, V] of the states that forward keeps for backward: none for one block."""
    slots, parts, part_tokens = _cut(v)
    return v.shape[0], v.shape[2], slots if v.shape[1] > parts * part_tokens else 0, k.shape[3], v.shape[3]


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H or 1, K], v [B, T, H, V], g [B, T, H] and initial [B, H, K, V] fp32, documents [B, T], the last
    three contiguous -> o like v, the last state, and the states that enter blocks, of `saved_shape`."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    scan = _scan(v, g, documents, chunk_of(k.shape[3], v.dtype))
    entering = scan.entering(k, v, initial, reverse=False)
    o, leaving = scan.scan(q, k, v, entering, reverse=False)
    saved = entering if entering is not None and scan.blocks > 1 else leaving.new_empty(saved_shape(k, v))
    return o, leaving, saved


def backward(
    do: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial: Tensor | None,
    documents: Tensor | None,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, dg, and the gradient of `initial`; `saved` as forward gave it."""
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    key = k.shape[3]
    scan = _scan(v, g, documents, chunk_of(key, v.dtype))
    chunk = gradient_chunk_of(key, v.dtype)
    wide = scan if chunk == scan.chunk else _scan(v, g, documents, chunk)
    kept = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    states = v.new_empty(v.shape[0] * v.shape[2] * wide.chunks, v.shape[3], key, dtype=kept)
    gradients = torch.empty_like(states)
    wide.states(k, v, initial if scan.blocks == 1 else saved, kept=states)
    entering = scan.entering(q, do, d_leaving, reverse=True)
    dv, d_initial = scan.scan(k, q, do, entering, reverse=True, kept=gradients)
    dq, dk, dg = key_gradients(q, k, v, do, wide.decays, documents, (states, gradients), (initial, d_leaving))
    return dq, dk, dv, dg, d_initial


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    # Not scan_kernel of documents in bf16: it spills 40 bytes a thread, 64 where it keeps states.
    kinds = ("bf16", "fp32")
    cases = launches(state_kernel, _state_tiles, chunk_of, kinds, "", "REVERSE")
    cases += launches(state_kernel, _wide_state_tiles, gradient_chunk_of, kinds, "KEPT ENTERING")
    return cases + launches(scan_kernel, _tiles, chunk_of, kinds, "", "REVERSE KEPT ENTERING")
