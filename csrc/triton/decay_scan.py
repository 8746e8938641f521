"""Linear recurrence with a fixed scalar decay a head or none: one scan kernel gives o, dq, dk and dv.

    o_t = sum_{j <= t} e^{-s (t - j)} (q_t . k_j) v_j + e^{-s (t + 1)} S_0^T q_t

    dq = scan(do, v, k) with the states transposed,    dk = scan(v, do, q), dv = scan(k, q, do) from the end

A sequence is cut into blocks, as many as fill the chip. A block goes over its chunks of C tokens with its state in
registers. The states that enter blocks are formed first: what each block adds (block_state_kernel), folded over
the blocks (fold_kernel). A scan from the end swaps two factors of every token: the decay from the start of its chunk,
e^{-s (i + 1)}, and to the end of its chunk, e^{-s (n - 1 - i)}.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.tiles import aligned, tiled
from megalin._triton.tuning import choose


@triton.jit
def _chunk_factors(slope, documents_ptr, start, length, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, C: tl.constexpr):
    """Decay from the start to each token and from each token to the end of a chunk [C], and through it, with the
    document of each token: factors are zero across a document's start. `slope` counts in powers of two."""
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
    """batch x head, and the first value column: tiles of one head run side by side and share its q and k."""
    program, tiles = tl.program_id(0), tl.cdiv(VALUE, BLOCK_VALUE)
    return program // tiles, program % tiles * BLOCK_VALUE


@triton.jit(do_not_specialize=["length", "part_tokens", "skipped"])
def block_state_kernel(
    k_tiles, v_tiles, slopes_ptr, documents_ptr, added_ptr, length, heads, parts, part_tokens, skipped,
    KEY: tl.constexpr, VALUE: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr, REVERSE: tl.constexpr,
    C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each part of a block adds to the state, into `added` [B H, parts, KEY, VALUE], for parts after `skipped`."""
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
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each part adds, PARTS a block -> states [rows, slots, SIZE] that enter the blocks; `boundary` [rows, SIZE]
    enters the first (the last, where REVERSE)."""
    row, column = _row_and_column(SIZE, BLOCK)
    batch, head, row = row // heads, row % heads, row.to(tl.int64)
    column += tl.arange(0, BLOCK)
    mask = column < SIZE
    added_ptr += row * blocks * PARTS * SIZE
    states_ptr += row * slots * SIZE
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
    state = tl.zeros([BLOCK], tl.float32)
    if BOUNDARY:
        state = tl.load(boundary_ptr + row * SIZE + column, mask=mask, other=0.0)
    slope = tl.load(slopes_ptr + head).to(tl.float32) * 1.4426950408889634 if DECAY else 0.0
    tl.store(states_ptr + (blocks - 1 if REVERSE else 0) * SIZE + column, state, mask=mask)
    for i in range(0, (blocks - 1) * PARTS):
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
        block = blocks - 1 - (i + 1) // PARTS if REVERSE else (i + 1) // PARTS
        tl.store(states_ptr + block * SIZE + column, state, mask=mask & ((i + 1) % PARTS == 0))


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


class Tiles(NamedTuple):
    """How a scan over `value` columns is cut and run."""

    chunk: int
    value: int
    warps: int
    stages: int


PROGRAMS = 264
"""Programs of scan_kernel that fill the chip: 132 processors, two each; of block_state_kernel twice as many."""


def _tiles(key: int, value: int, dtype: torch.dtype) -> Tiles:
    """Of scan_kernel."""
    if dtype != torch.bfloat16:
        return Tiles(chunk=32, value=32, warps=4, stages=1)
    width = min(64, max(16, triton.next_power_of_2(value)))
    if key > 128:
        return Tiles(chunk=32, value=width, warps=4, stages=2)
    return Tiles(chunk=64, value=width, warps=4, stages=3)


def _candidates(key: int, value: int, dtype: torch.dtype) -> list[Tiles]:
    """Of scan_kernel on chips without a measured table, the one that needs least first."""
    width = min(64, max(16, triton.next_power_of_2(value)))
    least = 16 if dtype != torch.bfloat16 and key > 128 else 32
    found = [Tiles(chunk=least, value=min(width, least), warps=4, stages=1)]
    if dtype == torch.bfloat16:
        found.append(Tiles(chunk=32, value=width, warps=4, stages=2))
        if key <= 128:  # wider tiles of more keys spill kilobytes, and take minutes to compile
            found += [Tiles(chunk=64, value=width, warps=8, stages=2), Tiles(chunk=64, value=width, warps=4, stages=3)]
    return found


def state_tiles(key: int, value: int, dtype: torch.dtype) -> Tiles:
    """Of block_state_kernel."""
    if dtype != torch.bfloat16:
        return _tiles(key, value, dtype)
    width = min(64, max(16, triton.next_power_of_2(value)))
    return Tiles(chunk=64, value=width, warps=4 if key <= 128 else 8, stages=2)


def num_blocks(rows: int) -> int:
    """Blocks into which a sequence is cut, for `rows` = batch x heads; independent of its length."""
    return max(1, PROGRAMS // (2 * rows))


def num_parts(rows: int, slots: int) -> int:
    """Parts of a block that form their states side by side."""
    return min(4, max(1, PROGRAMS // (rows * max(1, slots - 1))))


def _block_tokens(length: int, slots: int, parts: int) -> int:
    return triton.cdiv(triton.cdiv(length, slots), 64 * parts) * 64 * parts if slots > 1 else length


def numbers(dtype: torch.dtype) -> dict[str, object]:
    """Operands of products: bf16 as it is; fp16, whose range states leave, and fp32 through fp32 operands."""
    if dtype == torch.bfloat16:
        return {"OPERAND": tl.bfloat16, "PRECISION": "ieee"}
    return {"OPERAND": tl.float32, "PRECISION": "tf32x3"}


class Sequence(NamedTuple):
    """What the launches of one op share."""

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

    def states(self, k: Tensor, v: Tensor, boundary: Tensor | None, *, reverse: bool) -> Tensor | None:
        """States entering the blocks [B, H, slots, K, V] fp32; `boundary` [B, H, K, V] itself for one block."""
        if self.blocks == 1:
            return boundary
        batch, key, value = k.shape[0], k.shape[3], v.shape[3]
        states = k.new_empty(batch, self.heads, self.slots, key, value, dtype=torch.float32)
        added = k.new_empty(batch, self.heads, self.blocks * self.parts, key, value, dtype=torch.float32)
        tiles, width = state_tiles(key, value, v.dtype), max(16, triton.next_power_of_2(key))
        switches = {"DECAY": self.slopes is not None, "DOCUMENTS": self.documents is not None, "REVERSE": reverse}
        part_tokens, total = self.block_tokens // self.parts, self.blocks * self.parts
        block_state_kernel[batch * self.heads * triton.cdiv(value, tiles.value), total - self.parts](
            tiled(k, tiles.chunk, width), tiled(v, tiles.chunk, tiles.value), self.slopes, self.documents, added,
            self.length, self.heads, total, part_tokens, self.parts if reverse else 0, KEY=key, VALUE=value,
            **switches, C=tiles.chunk, BLOCK_KEY=width, BLOCK_VALUE=tiles.value, **numbers(v.dtype),
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        fold_kernel[batch * self.heads * triton.cdiv(key * value, 1024),](
            added, states, boundary, self.slopes, self.documents, self.length, self.heads, self.slots, self.blocks,
            part_tokens, SIZE=key * value, **switches, BOUNDARY=boundary is not None, PARTS=self.parts, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip
        return states

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
        """scan(q, k, v) like v, contiguous."""
        batch, key, value = k.shape[0], k.shape[3], v.shape[3]
        o = v.new_empty(v.shape)
        width = max(16, triton.next_power_of_2(key))

        def launch(tiles: Tiles) -> None:
            scan_kernel[batch * self.heads * triton.cdiv(value, tiles.value), self.blocks](
                *(tiled(x, tiles.chunk, width) for x in (q, k)), *(tiled(x, tiles.chunk, tiles.value) for x in (v, o)),
                self.slopes, self.documents, states, leaving, self.length, self.heads,
                1 if self.blocks == 1 else self.slots, self.block_tokens, KEY=key, VALUE=value,
                DECAY=self.slopes is not None, DOCUMENTS=self.documents is not None, REVERSE=reverse,
                TRANSPOSED=transposed, ENTERING=states is not None, LEAVING=leaving is not None, C=tiles.chunk,
                BLOCK_KEY=width, BLOCK_VALUE=tiles.value, **numbers(v.dtype), num_warps=tiles.warps,
                num_stages=tiles.stages,
            )  # fmt: skip

        recorded, shape = _tiles(key, value, v.dtype), f"{width} {triton.next_power_of_2(value)} {v.dtype}"
        launch(choose("decay_scan", shape, recorded, _candidates(key, value, v.dtype), launch))
        return o


def _sequence(k: Tensor, slopes: Tensor | None, documents: Tensor | None) -> Sequence:
    batch, length, heads = k.shape[:3]
    slots = num_blocks(batch * heads)
    parts = num_parts(batch * heads, slots)
    return Sequence(slopes, documents, length, heads, slots, parts, _block_tokens(length, slots, parts))


def saved_shape(batch: int, length: int, heads: int, key: int, value: int) -> tuple[int, int, int, int, int]:
    """[B, H, slots, K, V] of the states that forward keeps for backward: none for one block."""
    slots = num_blocks(batch * heads)
    cut = length > _block_tokens(length, slots, num_parts(batch * heads, slots))
    return batch, heads, slots if cut else 0, key, value


def forward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, initial: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, H, V], slopes [H] and initial [B, H, K, V] fp32, documents [B, T] -> o, the last
    state, and the states that enter blocks, of `saved_shape`."""
    sequence = _sequence(k, slopes, documents)
    q, k, v = aligned(q), aligned(k), aligned(v)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    states = sequence.states(k, v, initial, reverse=False)
    leaving = k.new_empty(batch, heads, key, value, dtype=torch.float32)
    o = sequence.scan(q, k, v, states, leaving)
    if states is None or sequence.blocks == 1:
        states = leaving.new_empty(saved_shape(batch, length, heads, key, value))
    return o, leaving, states


def backward(
    do: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    initial: Tensor | None,
    documents: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, and the gradient [B, H, K, V] fp32 of `initial`; `states` as forward gave them."""
    sequence = _sequence(k, slopes, documents)
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    dq = sequence.scan(do, v, k, initial if sequence.blocks == 1 else states, None, transposed=True)
    gradients = sequence.states(q, do, d_leaving, reverse=True)
    d_initial = k.new_empty(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    dk = sequence.scan(v, do, q, gradients, None, reverse=True, transposed=True)
    dv = sequence.scan(k, q, do, gradients, d_initial, reverse=True)
    return dq, dk, dv, d_initial


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    cases: list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]] = []
    integers = ("length", "heads", "slots", "block_tokens", "parts", "part_tokens", "skipped")
    launches = itertools.product(
        ((block_state_kernel, state_tiles), (scan_kernel, _tiles)),
        ((128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32)),
        (True, False),
    )
    for (kernel, table), (key, dtype), decay in launches:
        value, tiles, name = 128, table(key, 128, dtype), "bf16" if dtype == torch.bfloat16 else "fp32"
        types = dict.fromkeys(("q_tiles", "k_tiles"), f"tensordesc<{name}[1, 1, {tiles.chunk}, {key}]>")
        types |= dict.fromkeys(("v_tiles", "o_tiles"), f"tensordesc<{name}[1, 1, {tiles.chunk}, {tiles.value}]>")
        types |= dict.fromkeys(("added_ptr", "entering_ptr", "leaving_ptr", "slopes_ptr"), "*fp32")
        types |= dict.fromkeys(integers, "i32")
        constants = {"KEY": key, "VALUE": value, "DECAY": decay, "DOCUMENTS": False, "C": tiles.chunk}
        constants |= {"BLOCK_KEY": key, "BLOCK_VALUE": tiles.value, **numbers(dtype), "ENTERING": True}
        constants |= {"documents_ptr": None} | ({} if decay else {"slopes_ptr": None})
        for reverse in (False, True):
            switches = {"REVERSE": reverse, "TRANSPOSED": reverse, "LEAVING": not reverse}
            chosen = {name: x for name, x in {**constants, **switches}.items() if name in kernel.arg_names}
            signature = {name: x for name, x in types.items() if name in kernel.arg_names and name not in chosen}
            cases.append((kernel, signature, chosen, {"num_warps": tiles.warps, "num_stages": tiles.stages}))
    return cases
