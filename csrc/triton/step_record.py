"""Marks of a CUDA graph's progress: each kernel is one thread of work, a node of the graph.

The state on the device is [3] int64: number of replays, start of the last wait, and sum of the waits of this replay, in
ns of the GPU's global timer. `words` lies in pinned host memory, which the host reads while kernels run or hang.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl

START, SUM = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def begin_kernel(state_ptr):
    tl.store(state_ptr, tl.load(state_ptr) + 1)
    tl.store(state_ptr + SUM, tl.zeros([], tl.int64))


@triton.jit
def _wait(state_ptr, ENDS: tl.constexpr):
    if ENDS:
        waited = _nanoseconds() - tl.load(state_ptr + START)
        tl.store(state_ptr + SUM, tl.load(state_ptr + SUM) + waited)
    else:
        tl.store(state_ptr + START, _nanoseconds())


@triton.jit(do_not_specialize=["place"])
def mark_kernel(state_ptr, words_ptr, place, WAITS: tl.constexpr, ENDS: tl.constexpr):
    tl.store(words_ptr + place, tl.load(state_ptr))
    if WAITS:
        _wait(state_ptr, ENDS)


@triton.jit
def wait_kernel(state_ptr, ENDS: tl.constexpr):
    _wait(state_ptr, ENDS)


def begin(state: Tensor) -> None:
    """Begins a replay: counts it, and sets the sum of its waits to 0."""
    begin_kernel[(1,)](state, num_warps=1)


def mark(state: Tensor, words: Tensor, place: int, *, waits: bool, ends: bool) -> None:
    """Writes the number of this replay to words[place]; with `waits` as `wait` too."""
    mark_kernel[(1,)](state, words, place, waits, waits and ends, num_warps=1)


def wait(state: Tensor, *, ends: bool) -> None:
    """Begins a wait of the current CUDA stream, or ends it and adds its time."""
    wait_kernel[(1,)](state, ends, num_warps=1)
