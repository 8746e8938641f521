"""The forget-gate scan in CUDA C++ (csrc/cuda/forget_gate_scan.cu): gates, scores and states never leave the chip.

A thread block walks the chunks of a segment with the state in registers, forward, and with the state's gradient in
reverse. Only the states entering chunks are stored for the backward. For chunks with steep decays Triton kernels
(csrc/triton/scans/forget_gate_steep.py) compute scores, and the gradients of q, logits and bounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.dispatch.cuda_launch import call
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import Begun, Finished, Inputs, ScanOutput, run_scan
from megalin.ops.scans.fixed_decay_cuda import CHUNK, PROCESSORS, aligned, capability, is_hopper, operand
from megalin.ops.scans.transition import DiagonalDecay

MOST = 16
"""Segments of a sequence."""

WIDTHS = (64, 128)
"""Keys, and as many values, a head."""


def limit(q: Tensor, logit: Tensor, v: Tensor) -> str:
    """Reason why the kernels do not take these inputs; empty if they do."""
    if not q.dtype == logit.dtype == v.dtype == torch.bfloat16:
        return f"q, logit, v of {q.dtype}, {logit.dtype}, {v.dtype}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} keys and {v.shape[-1]} values, only 64 or 128 of both"
    if v.is_cuda and not is_hopper():
        return f"compute capability {capability()}, only 9.0"
    return ""


def scan(
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    *,
    scale: float,
    document_ids: Tensor | None,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    state_gradient: bool = True,
) -> ScanOutput:
    """`forget_gate_scan` by these kernels."""
    documents = None if document_ids is None else document_ids.to(torch.int32).contiguous()
    first = None if initial_state is None else initial_state.float()
    inputs = (q, logit, v, bound.contiguous(), documents)
    return run_scan(_Kernels(scale), inputs, initial_state=first, shard=shard, state_gradient=state_gradient)


class SegmentPlan(NamedTuple):
    """Partition of a sequence's chunks into segments, which run in parallel; the last ones may be shorter or empty."""

    segments: int
    chunks: int


def cut(rows: int, length: int) -> SegmentPlan:
    """The partition of each of `rows` = batch x heads sequences; its number of segments does not depend on the length.

    A multiprocessor runs one segment at a time. The update of each segment before it costs about 1 % of a row.
    """
    segments = min(range(1, MOST + 1), key=lambda n: -(-rows * n // PROCESSORS) / n + 0.01 * n)
    return SegmentPlan(segments, -(-length // (CHUNK * segments)))


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
    partition = cut(batch * heads, length)
    found = _empty_segments(v, batch, heads, partition.segments, key, value)
    tensors = (operand(q), operand(logit), operand(v), bound, documents, kinds, *found)
    sizes = (batch, length, heads, key, *partition)
    call("gate_segments", q.device, (*tensors, *sizes, scale, kinds is None, last))
    return found


def _totals(found: list[Tensor], v: Tensor, *, reverse: bool, total: bool) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import vector_decay as kernels

    return kernels.total_update(kernels.Segments(*found), v, reverse=reverse, total=total)


def _fake_begin(q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, _: Any, total: bool, __: float) -> list[Tensor]:
    (batch, length, heads, key), value = q.shape, v.shape[3]
    chunks, state = -(-length // CHUNK), (batch, heads, key, value)
    sums = [bound.new_empty(x) for x in ((state, state[:3]) if total else (0, 0))]
    scores = v.new_empty(batch, heads, chunks * CHUNK, CHUNK)
    kinds = q.new_empty(batch, heads, chunks, dtype=torch.int32)
    segments = _empty_segments(v, batch, heads, cut(batch * heads, length).segments, key, value)
    return [*sums, kinds, scores, *segments]


@custom_op("forget_gate_scan_begin", _fake_begin)
def _begin(
    q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, documents: Tensor | None, total: bool, scale: float
) -> list[Tensor]:
    """The state update and decay of all tokens, empty unless `total`, and for `_finish` the kinds of chunks, the scores
    of steep ones, and updates and decays of segments."""
    from megalin._triton.scans import forget_gate_steep as steep

    q, logit, v = aligned(q), aligned(logit), aligned(v)
    batch, length, heads, _ = q.shape
    kinds = q.new_full((batch, heads, -(-length // CHUNK)), 2, dtype=torch.int32)
    segments = _segments(q, logit, v, bound, documents, kinds, scale, total)
    scores, _ = steep.scores(q, logit, bound, documents, kinds, scale)
    return [*_totals(segments, v, reverse=False, total=total), kinds, scores, *segments]


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
    kinds, scores, updates, decays = begun
    (batch, length, heads, key), value = q.shape, v.shape[3]
    output = v.new_empty(v.shape)
    final = bound.new_empty(batch, heads, key, value)
    states = v.new_empty(*kinds.shape, key, value) if keep else v.new_empty(0)
    tensors = (operand(q), operand(logit), operand(v), bound, documents, scores, kinds, updates, decays)
    results = (contiguous(entering), output, states if keep else None, final)
    call("gate_sweep", q.device, (*tensors, *results, *q.shape, *cut(batch * heads, length), scale))
    return output, final, states


def _fake_begin_backward(
    d_output: Tensor, q: Tensor, logit: Tensor, bound: Tensor, documents: Any, total: bool, scale: float
) -> list[Tensor]:
    (batch, length, heads, key), value = q.shape, d_output.shape[3]
    gradient = bound.new_empty((batch, heads, key, value) if total else 0)
    segments = cut(batch * heads, length).segments
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
    kinds, states = saved
    scores, through = steep.scores(q, logit, bound, documents, kinds, scale)  # again, as most calls have none
    dq, d_logit, dv = q.new_empty(q.shape), logit.new_empty(logit.shape), v.new_empty(v.shape)
    d_bound = torch.empty_like(through)
    d_states = torch.empty_like(states)
    d_entering = bound.new_empty(q.shape[0], *q.shape[2:], v.shape[3])
    operands = [operand(x) for x in (q, logit, v, d_output)]
    tensors = (*operands, bound, documents, scores, kinds, states, *segments, contiguous(d_leaving))
    results = (dq, d_logit, dv, d_bound, d_states, d_entering)
    call("gate_reverse", q.device, (*tensors, *results, *q.shape, *cut(q.shape[0] * q.shape[2], q.shape[1]), scale))
    inputs = (d_output, q, logit, v, bound, documents, kinds, through, states, d_states)
    steep.gradients(*inputs, (dq, d_logit, d_bound), scale)
    return [dq, d_logit, dv, d_bound.sum((0, 2)), d_entering]


class _Kernels(NamedTuple):
    """`ScanKernels` of q, logit [B, T, H, K] and v [B, T, H, V] bf16, bound [H, K] fp32, document_ids [B, T]."""

    scale: float

    def begin(self, inputs: Inputs, *, exchange: bool) -> Begun:
        state, decay, *begun = _begin(*inputs, exchange, self.scale)
        return Begun((state, DiagonalDecay(decay.log())) if exchange else None, begun)

    def finish(self, inputs: Inputs, entering: Tensor | None, begun: Begun, *, keep: bool) -> Finished:
        output, state, states = _finish(*inputs, entering, begun.handed, keep, self.scale)
        transition = () if begun.exchanged is None else begun.exchanged[1].tensors()
        return Finished(output, state, [begun.handed[0], states, *transition])

    def begin_backward(self, d_output: Tensor, inputs: Inputs, saved: Inputs, *, exchange: bool) -> Begun:
        q, logit, _, bound, documents = inputs
        gradient, *segments = _begin_backward(d_output, q, logit, bound, documents, exchange, self.scale)
        return Begun((gradient, DiagonalDecay(saved[2])) if exchange else None, segments)

    def finish_backward(
        self, d_output: Tensor, d_leaving: Tensor | None, inputs: Inputs, saved: Inputs, begun: Begun
    ) -> tuple[list[Tensor | None], Tensor]:
        found = _finish_backward(d_output, d_leaving, *inputs, list(saved[:2]), begun.handed, self.scale)
        return [*found[:4], None], found[4]
