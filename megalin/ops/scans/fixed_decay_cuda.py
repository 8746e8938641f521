"""Launches of the fixed-decay scan in CUDA C++ (csrc/cuda/decay_scan.cuh): partition of a sequence, saved states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.ops.dispatch.backend import Backend
from megalin.ops.dispatch.compile_constants import assume_constant_result
from megalin.ops.dispatch.cuda_launch import call
from megalin.ops.dispatch.fusion import is_auto

HOPPER = (9, 0)
"""The compute capability that csrc/cuda/decay_scan.cu has its form with TMA and wgmma for; others run that for 8.0."""

WIDE = 128
"""Keys or values a head above which a thread block needs the form for Hopper."""

PROCESSORS = 132
"""Thread blocks that fill the GPU: of the scan; the state kernels before it launch twice as many."""

CHUNK = 64


def limit(op: str, backend: Backend, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Reason why a call does not take the CUDA kernels; empty if it may."""
    return unsupported(q, k, v) or unmeasured(op, backend, v)


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Reason why the CUDA kernels do not take inputs that another kernel takes; empty if they do."""
    if v.dtype != torch.bfloat16:
        return f"q, k, v of {v.dtype}"
    widest = max(k.shape[-1], v.shape[-1])
    if widest > WIDE and v.is_cuda and not is_hopper():
        return f"heads of {k.shape[-1]} keys and {v.shape[-1]} values, above {WIDE}, except on compute capability 9.0"
    return ""


def unmeasured(op: str, backend: Backend, v: Tensor) -> str:
    """Reason why "auto" leaves a GPU to the Triton kernels: only the form for Hopper was measured to be faster."""
    if not v.is_cuda or is_hopper() or not is_auto(op, backend):
        return ""
    return f"compute capability {capability()} unless it is asked for: it was measured on 9.0 alone"


@assume_constant_result
def is_hopper() -> bool:
    """Whether the current GPU has compute capability 9.0."""
    return torch.cuda.get_device_capability() == HOPPER


@assume_constant_result
def capability() -> str:
    """Such as 8.0; a tuple as a constant of torch.compile cannot be compared with torch 2.11."""
    return "{}.{}".format(*torch.cuda.get_device_capability())


class Cut(NamedTuple):
    """Partition of a sequence into blocks, and of each block into parts whose states are computed in parallel."""

    slots: int
    parts: int
    block_tokens: int
    blocks: int

    def num_parts(self, *, last: bool) -> int:
        """Number of parts whose state updates are needed: all, or unless `last` none of a single block."""
        return 0 if self.blocks == 1 and not last else self.blocks * self.parts


def _plan(rows: int, length: int, *, together: bool) -> Cut:
    """`cut` for one scan of `rows` = batch x heads, or for two scans in one launch (`together`)."""
    return cut(2 * rows if together else rows, length)


def cut(rows: int, length: int) -> Cut:
    """Partition for `rows` heads of sequences in one launch; slots and parts do not depend on the length."""
    slots = max(1, PROCESSORS // rows)
    parts = 1 if slots == 1 else min(4, max(1, 2 * PROCESSORS // (rows * (slots - 1))))
    unit = CHUNK * parts
    block_tokens = -(-length // (slots * unit)) * unit if slots > 1 else length
    return Cut(slots, parts, block_tokens, -(-length // block_tokens))


class CudaSequence(NamedTuple):
    """Arguments common to the launches of one op."""

    slopes: Tensor | None  # [H] fp32
    documents: Tensor | None  # [B, T] int32
    batch: int
    length: int
    heads: int

    def shape(self, plan: Cut, key: int, value: int, *, reverse: bool) -> tuple[Tensor | int | None, ...]:
        """Arguments of the C++ struct ScanShape."""
        states = 1 if plan.blocks == 1 else plan.slots, plan.blocks, plan.block_tokens
        return self.slopes, self.documents, self.batch, self.length, self.heads, key, value, *states, reverse

    def parts(self, plan: Cut, k: Tensor, v: Tensor, *, reverse: bool, last: bool) -> Tensor:
        """State update of each part [B, H, parts, K, V] fp32; parts of the last block in scan direction are skipped
        unless `last`."""
        key, value = k.shape[3], v.shape[3]
        added = k.new_empty(self.batch, self.heads, plan.num_parts(last=last), key, value, dtype=torch.float32)
        if added.shape[2] == 0:
            return added
        shape = self.shape(plan, key, value, reverse=reverse)
        call("decay_scan_parts", k.device, shape, operand(k), operand(v), added, plan.parts, last)
        return added

    def states(self, plan: Cut, parts: Tensor, boundary: Tensor | None, *, reverse: bool) -> Tensor | None:
        """States entering the blocks [B, H, slots, K, V] fp32; for one block `boundary` [B, H, K, V]."""
        if plan.blocks == 1:
            return boundary
        key, value = parts.shape[3:]
        states = parts.new_empty(self.batch, self.heads, plan.slots, key, value)
        shape = self.shape(plan, key, value, reverse=reverse)
        call("decay_scan_fold", parts.device, shape, parts, boundary, states, plan.parts, False)
        return states

    def total(self, plan: Cut, parts: Tensor, *, reverse: bool) -> Tensor:
        """State update of all parts together, [B, H, K, V] fp32."""
        key, value = parts.shape[3:]
        total = parts.new_empty(self.batch, self.heads, key, value)
        shape = self.shape(plan, key, value, reverse=reverse)
        call("decay_scan_fold", parts.device, shape, parts, None, total, plan.parts, True)
        return total


class CudaScan(NamedTuple):
    """Tensors of one scan(q, k, v) -> o; o like v and contiguous; states [B, H, (slots,) V, K] if `transposed`."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    entering: Tensor | None
    leaving: Tensor | None
    transposed: bool = False


def saved_shape(batch: int, length: int, heads: int, key: int, value: int) -> tuple[int, int, int, int, int]:
    """Shape [B, H, slots, K, V] of the states saved for backward; slots is 0 for one block."""
    plan = cut(batch * heads, length)
    return batch, heads, plan.slots if plan.blocks > 1 else 0, key, value


def parts_shape(
    batch: int, length: int, heads: int, key: int, value: int, *, reverse: bool, total: bool
) -> tuple[int, int, int, int, int]:
    """Shape [B, H, parts, K, V] of the state updates that `begin` returns."""
    plan = _plan(batch * heads, length, together=reverse and key == value)
    return batch, heads, plan.num_parts(last=total), key, value


def begin(
    k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None, *, reverse: bool, total: bool
) -> tuple[Tensor, Tensor]:
    """First phase: the state update of all tokens [B, H, K, V] fp32, empty unless `total`, and that of each part, for
    `finish`. `reverse`, with q and do as k and v: the updates of the state's gradient, for `finish_backward`."""
    sequence = _sequence(k, slopes, documents)
    k, v = aligned(k), aligned(v)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    plan = _plan(batch * heads, length, together=reverse and key == value)
    parts = sequence.parts(plan, k, v, reverse=reverse, last=total)
    return sequence.total(plan, parts, reverse=reverse) if total else parts.new_empty(0), parts


def finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    entering: Tensor | None,
    documents: Tensor | None,
    parts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase: q, k [B, T, H, K], v [B, T, H, V] bf16, slopes [H] and entering [B, H, K, V] fp32 and documents
    [B, T] contiguous, `parts` from `begin` -> o, the final state, and the states entering blocks, of `saved_shape`."""
    sequence = _sequence(k, slopes, documents)
    q, k, v = aligned(q), aligned(k), aligned(v)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    plan = _plan(batch * heads, length, together=False)
    states = sequence.states(plan, parts, entering, reverse=False)
    leaving = k.new_empty(batch, heads, key, value, dtype=torch.float32)
    o = v.new_empty(v.shape)
    _launch(sequence, plan, [CudaScan(q, k, v, o, states, leaving)], reverse=False)
    if states is None or plan.blocks == 1:
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
    sequence = _sequence(k, slopes, documents)
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    plan = _plan(batch * heads, length, together=False)
    boundary = entering if plan.blocks == 1 else states
    _launch(sequence, plan, [CudaScan(do, v, k, dq, boundary, None, transposed=True)], reverse=False)

    # dk and dv read the same three tensors: if K = V, one launch computes both.
    together = key == value
    plan = _plan(batch * heads, length, together=together)
    gradients = sequence.states(plan, parts, d_leaving, reverse=True)
    d_entering = k.new_empty(batch, heads, key, value, dtype=torch.float32)
    both = [CudaScan(v, do, q, dk, gradients, None, transposed=True), CudaScan(k, q, do, dv, gradients, d_entering)]
    for scans in [both] if together else [both[:1], both[1:]]:
        _launch(sequence, plan, scans, reverse=True)
    return dq, dk, dv, d_entering


def _sequence(k: Tensor, slopes: Tensor | None, documents: Tensor | None) -> CudaSequence:
    documents = None if documents is None else documents.int()
    return CudaSequence(slopes, documents, *k.shape[:3])


def _launch(sequence: CudaSequence, plan: Cut, scans: list[CudaScan], *, reverse: bool) -> None:
    key, value = scans[0].k.shape[3], scans[0].v.shape[3]
    shape = sequence.shape(plan, key, value, reverse=reverse)
    arguments = tuple((operand(x.q), operand(x.k), operand(x.v), *x[3:]) for x in scans)
    call("decay_scan", scans[0].k.device, shape, arguments)


def operand(x: Tensor) -> tuple[Tensor | int, ...]:
    """Arguments of the C++ struct Operand."""
    return x, *x.stride()[:3]


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy if a token's channels are not contiguous and 16-byte aligned; D % 8 = 0."""
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)
