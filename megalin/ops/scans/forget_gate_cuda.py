"""Launches of the forget-gate scan's kernels in CUDA C++ (csrc/cuda/forget_gate_scan.cu), for chunks with mild decays.

The Triton kernels (csrc/triton/scans/vector_decay.py) compute the other chunks and pass states between chunks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.dispatch.backend import Backend
from megalin.ops.dispatch.cuda_launch import call
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.scans.driver import Begun, Finished, Inputs
from megalin.ops.scans.fixed_decay_cuda import CHUNK, PROCESSORS, aligned, operand, unmeasured
from megalin.ops.scans.transition import DiagonalDecay

WIDTHS = (64, 128)
"""Keys and values a head."""


def limit(op: str, backend: Backend, q: Tensor, v: Tensor) -> str:
    """Reason why a call does not take the CUDA kernels; empty if it may."""
    if v.dtype != torch.bfloat16:
        return f"q, logit, v of {v.dtype}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} keys and {v.shape[-1]} values; it has 64 or 128 of both"
    return unmeasured(op, backend, v)


def scores(
    q: Tensor, logit: Tensor, bound: Tensor, documents: Tensor | None, results: tuple[Tensor, ...], scale: float
) -> None:
    """Writes `results`, the Chunks of csrc/triton/scans/vector_decay.py, of mild chunks, and the kind of all.

    Args:
        q, logit: [B, T, H, K] bf16.
        bound: [H, K] fp32.
        documents: [B, T] int32, contiguous.
    """
    q, logit = aligned(q), aligned(logit)
    q_start, k_end, pairs, through, kind = results
    tensors = (operand(q), operand(logit), bound, documents, q_start, k_end, pairs, through, kind)
    call("gate_scores", q.device, (*tensors, *q.shape, scale))


def gradients(
    d_output: Tensor,
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    states: Tensor,
    d_states: Tensor,
    kind: Tensor,
    results: tuple[Tensor, ...],
    scale: float,
) -> None:
    """Writes `results`: the gradients of q and of logits [B, T, H, K] and of bounds by chunk [B, H, N, K] fp32, of mild
    chunks.

    Args:
        d_output, v: [B, T, H, V] bf16.
        q, logit: [B, T, H, K] bf16.
        bound: [H, K] fp32.
        states: entering the chunks, [B, H, N, K, V] bf16.
        d_states: gradients of the states leaving the chunks, the same.
        kind: [B, H, N] int32.
    """
    operands = [aligned(x) for x in (q, logit, v, d_output)]
    tensors = (*map(operand, operands), bound, states, d_states, kind, *results)
    call("gate_gradients", q.device, (*tensors, *q.shape, v.shape[3], scale))


class Plan(NamedTuple):
    """Partition of a sequence's chunks into segments, which run in parallel."""

    segments: int
    chunks: int
    """Chunks a segment; the last may have fewer."""


@functools.cache
def plan(rows: int, length: int) -> Plan:
    """The partition of `rows` = batch x heads sequences that takes the least time: a multiprocessor runs one segment at
    a time, and reading the update of a segment before takes as long as half a chunk."""
    chunks = -(-length // CHUNK)

    def cost(found: Plan) -> float:
        waves = -(-rows * found.segments // PROCESSORS)
        return waves * (found.chunks + 0.25 * (found.segments - 1))

    sizes = {-(-chunks // segments) for segments in range(1, min(chunks, 64) + 1)}
    return min((Plan(-(-chunks // each), each) for each in sorted(sizes, reverse=True)), key=cost)


def _empty_segments(like: Tensor, batch: int, heads: int, segments: int, key: int, value: int) -> list[Tensor]:
    """Uninitialised updates and decays of segments, none of a single one."""
    shape = (batch, heads, segments, key)
    return [like.new_empty(x, dtype=torch.float32) for x in ((*shape, value), shape)]


def _segments(
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    documents: Tensor | None,
    kinds: Tensor | None,
    scale: float,
    last: bool,
) -> list[Tensor]:
    """Updates and decays of segments, and without `kinds` those of the gradient, from the gradient v of the output."""
    (batch, length, heads, key), value = q.shape, v.shape[3]
    cut = plan(batch * heads, length)
    found = _empty_segments(v, batch, heads, cut.segments, key, value)
    tensors = (operand(q), operand(logit), operand(v), bound, documents, kinds, *found)
    sizes = (batch, length, heads, key, value, *cut)
    call("gate_segments", q.device, (*tensors, *sizes, scale, kinds is None, last))
    return found


def _totals(found: list[Tensor], v: Tensor, *, reverse: bool, total: bool) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import vector_decay as kernels

    return kernels.total_update(kernels.Segments(*found), v, reverse=reverse, total=total)


def _fake_begin(q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, _: Any, total: bool, __: float) -> list[Tensor]:
    (batch, length, heads, key), value = q.shape, v.shape[3]
    chunks, state = -(-length // CHUNK), (batch, heads, key, value)
    sums = [bound.new_empty(x) for x in ((state, state[:3]) if total else (0, 0))]
    scores, through = v.new_empty(batch, heads, chunks * CHUNK, CHUNK), bound.new_empty(batch, heads, chunks, key)
    kinds = q.new_empty(batch, heads, chunks, dtype=torch.int32)
    segments = _empty_segments(v, batch, heads, plan(batch * heads, length).segments, key, value)
    return [*sums, kinds, scores, through, *segments]


@custom_op("forget_gate_scan_begin", _fake_begin)
def _begin(
    q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, documents: Tensor | None, total: bool, scale: float
) -> list[Tensor]:
    """The state update and decay of all tokens, empty unless `total`, and for `_finish` and the backward the kinds of
    chunks, scores and decays of steep ones; for `_finish` updates and decays of segments."""
    from megalin._triton.scans import forget_gate_steep as steep

    q, logit, v = aligned(q), aligned(logit), aligned(v)
    batch, length, heads, _ = q.shape
    kinds = q.new_full((batch, heads, -(-length // CHUNK)), 2, dtype=torch.int32)
    segments = _segments(q, logit, v, bound, documents, kinds, scale, total)
    scores, through = steep.scores(q, logit, bound, documents, kinds, scale, v.dtype)
    return [*_totals(segments, v, reverse=False, total=total), kinds, scores, through, *segments]


def _fake_finish(
    q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, documents: Any, entering: Any, begun: list[Tensor], keep: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, length, heads, key), value = q.shape, v.shape[3]
    states = v.new_empty(batch, heads, -(-length // CHUNK), key, value) if keep else v.new_empty(0)
    return v.new_empty(v.shape), bound.new_empty(batch, heads, key, value), states


@custom_op("forget_gate_scan_finish", _fake_finish)
def _finish(
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    documents: Tensor | None,
    entering: Tensor | None,
    begun: list[Tensor],
    keep: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, final state, and if `keep` the states S' entering chunks."""
    q, logit, v = aligned(q), aligned(logit), aligned(v)
    kinds, scores, _, updates, decays = begun
    (batch, length, heads, key), value = q.shape, v.shape[3]
    output = v.new_empty(v.shape)
    final = bound.new_empty(batch, heads, key, value)
    states = v.new_empty(*kinds.shape, key, value) if keep else v.new_empty(0)
    tensors = (operand(q), operand(logit), operand(v), bound, documents, scores, kinds, updates, decays)
    results = (contiguous(entering), output, states if keep else None, final)
    call("gate_sweep", q.device, (*tensors, *results, *q.shape, *plan(batch * heads, length), scale))
    return output, final, states


def _fake_begin_backward(
    d_output: Tensor, q: Tensor, logit: Tensor, bound: Tensor, documents: Any, total: bool, scale: float
) -> list[Tensor]:
    (batch, length, heads, key), value = q.shape, d_output.shape[3]
    gradient = bound.new_empty((batch, heads, key, value) if total else 0)
    segments = plan(batch * heads, length).segments
    return [gradient, *_empty_segments(bound, batch, heads, segments, key, value)]


@custom_op("forget_gate_scan_begin_backward", _fake_begin_backward)
def _begin_backward(
    d_output: Tensor, q: Tensor, logit: Tensor, bound: Tensor, documents: Tensor | None, total: bool, scale: float
) -> list[Tensor]:
    """The output's contribution to the gradient of S_in, empty unless `total`, and updates and decays of segments."""
    d_output, q, logit = aligned(d_output), aligned(q), aligned(logit)
    segments = _segments(q, logit, d_output, bound, documents, None, scale, total)
    return [_totals(segments, d_output, reverse=True, total=total)[0], *segments]


def _fake_finish_backward(
    d_output: Tensor, d_leaving: Any, q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, *_: Any
) -> list[Tensor]:
    d_entering = bound.new_empty(q.shape[0], *q.shape[2:], v.shape[3])
    return [*(x.new_empty(x.shape) for x in (q, logit, v)), bound.new_empty(bound.shape), d_entering]


@custom_op("forget_gate_scan_finish_backward", _fake_finish_backward)
def _finish_backward(
    d_output: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    documents: Tensor | None,
    saved: list[Tensor],
    segments: list[Tensor],
    scale: float,
) -> list[Tensor]:
    from megalin._triton.scans import forget_gate_steep as steep

    d_output, q, logit, v = aligned(d_output), aligned(q), aligned(logit), aligned(v)
    kinds, scores, through, states = saved
    dq, d_logit, dv = q.new_empty(q.shape), logit.new_empty(logit.shape), v.new_empty(v.shape)
    d_bound = torch.empty_like(through)
    d_states = torch.empty_like(states)
    d_entering = bound.new_empty(q.shape[0], *q.shape[2:], v.shape[3])
    operands = [operand(x) for x in (q, logit, v, d_output)]
    tensors = (*operands, bound, documents, scores, kinds, states, *segments, contiguous(d_leaving))
    results = (dq, d_logit, dv, d_bound, d_states, d_entering)
    call("gate_reverse", q.device, (*tensors, *results, *q.shape, *plan(q.shape[0] * q.shape[2], q.shape[1]), scale))
    inputs = (d_output, q, logit, v, bound, documents, kinds, through, states, d_states)
    steep.gradients(*inputs, (dq, d_logit, d_bound), scale)
    return [dq, d_logit, dv, d_bound.sum((0, 2)), d_entering]


class Kernels(NamedTuple):
    """`ScanKernels` of q, logit [B, T, H, K] and v [B, T, H, V] bf16, bound [H, K] fp32, document_ids [B, T]."""

    scale: float

    def begin(self, inputs: Inputs, *, exchange: bool) -> Begun:
        state, decay, *begun = _begin(*inputs, exchange, self.scale)
        return Begun((state, DiagonalDecay(decay.log())) if exchange else None, begun)

    def finish(self, inputs: Inputs, entering: Tensor | None, begun: Begun, *, keep: bool) -> Finished:
        output, state, states = _finish(*inputs, entering, begun.handed, keep, self.scale)
        transition = () if begun.exchanged is None else begun.exchanged[1].tensors()
        return Finished(output, state, [*begun.handed[:3], states, *transition])

    def begin_backward(self, d_output: Tensor, inputs: Inputs, saved: Inputs, *, exchange: bool) -> Begun:
        q, logit, _, bound, documents = inputs
        gradient, *segments = _begin_backward(d_output, q, logit, bound, documents, exchange, self.scale)
        return Begun((gradient, DiagonalDecay(saved[4])) if exchange else None, segments)

    def finish_backward(
        self, d_output: Tensor, d_leaving: Tensor | None, inputs: Inputs, saved: Inputs, begun: Begun
    ) -> tuple[list[Tensor | None], Tensor]:
        found = _finish_backward(d_output, d_leaving, *inputs, list(saved[:4]), begun.handed, self.scale)
        return [*found[:4], None], found[4]
