"""torch.library ops of the vector-decay scan: the scan, the two-phase scan around a state exchange, and the step.

The first phase, forward and backward, needs no data of other ranks (docs/adr/0016).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalin.ops.scans.context_parallel import SequenceShard, ShardDocuments, StateExchange

CHUNK = 64


def rows(x: Tensor) -> Tensor:
    """`x`, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("megalin::vector_decay_scan", mutates_args=())
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    document_ids: Tensor | None,
    scale: float,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns output, final state, and Chunks and states for the backward (csrc/triton/scans/vector_decay.py)."""
    from megalin._triton.scans import vector_decay as kernels

    output, state, chunks, states = kernels.forward(q, k, v, log_decay, scale, initial_state, document_ids, keep)
    return output, state, *chunks, states


@scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    document_ids: Tensor | None,
    scale: float,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    chunks = _fake_chunks(q, v)
    states = v.new_empty(*chunks[3].shape, v.shape[3]) if keep else v.new_empty(0)
    return v.new_empty(v.shape), _fake_state(q, v), *chunks, states


def _fake_state(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)


def _fake_chunks(q: Tensor, v: Tensor) -> _Five:
    batch, length, heads, width = q.shape
    chunks = -(-length // CHUNK)
    rows = (batch, heads, chunks * CHUNK)
    return (
        v.new_empty(*rows, width),
        v.new_empty(*rows, width),
        v.new_empty(*rows, CHUNK),
        v.new_empty(batch, heads, chunks, width, dtype=torch.float32),
        v.new_empty(batch, heads, chunks, dtype=torch.int32),
    )


@torch.library.custom_op("megalin::vector_decay_scan_backward", mutates_args=())
def _backward(
    doutput: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    document_ids: Tensor | None,
    saved: list[Tensor],
    scale: float,
    backend: str,
) -> _Five:
    from megalin._triton.scans import vector_decay as kernels

    dstate = None if dstate is None else dstate.contiguous()
    chunks, states = kernels.Chunks(*saved[:5]), saved[5]
    return kernels.backward(rows(doutput), dstate, q, k, v, log_decay, scale, document_ids, chunks, states)


@_backward.register_fake
def _(
    doutput: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    document_ids: Tensor | None,
    saved: list[Tensor],
    scale: float,
    backend: str,
) -> _Five:
    return _fake_gradients(q, k, v)


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor) -> _Five:
    wide = q.new_empty(q.shape, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), wide, _fake_state(q, v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_decay, initial_state, document_ids, ctx.scale, _, ctx.backend = inputs
    ctx.has_initial_state = initial_state is not None
    ctx.save_for_backward(q, k, v, log_decay, document_ids, *output[2:])
    # Otherwise autograd allocates zero gradients as large as the states.
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, doutput: Tensor | None, dstate: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    q, k, v, log_decay, document_ids, *saved = ctx.saved_tensors
    doutput = v.new_zeros(v.shape) if doutput is None else doutput
    dq, dk, dv, dg, dinitial = _backward(
        doutput, dstate, q, k, v, log_decay, document_ids, saved, ctx.scale, ctx.backend
    )
    return dq, dk, dv, dg, dinitial if ctx.has_initial_state else None, None, None, None, None


scan.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("megalin::vector_decay_scan_begin", mutates_args=())
def _begin(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, document_ids: Tensor | None, scale: float
) -> list[Tensor]:
    """First phase: the final state from a zero initial state, the total decay, Chunks and Segments for `_finish`."""
    from megalin._triton.scans import vector_decay as kernels

    state, decay, chunks, segments = kernels.begin(q, k, v, log_decay, scale, document_ids)
    return [state, decay, *chunks, *segments]


@_begin.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, document_ids: Tensor | None, scale: float) -> list[Tensor]:
    state = _fake_state(q, v)
    return [state, state.new_empty(state.shape[:3]), *_fake_chunks(q, v), *_fake_segments(q, v)]


def _fake_segments(q: Tensor, v: Tensor) -> list[Tensor]:
    from megalin._triton.scans import vector_decay as kernels

    shape = kernels.segments_shape(q, v)
    update = v.new_empty(*shape, v.shape[3], dtype=torch.float32)
    return [update, update.new_empty(shape)]


@torch.library.custom_op("megalin::vector_decay_scan_finish", mutates_args=())
def _finish(v: Tensor, entering: Tensor, begun: list[Tensor], keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase: output, final state, and the states entering chunks."""
    from megalin._triton.scans import vector_decay as kernels

    return kernels.finish(v, entering.contiguous(), kernels.Chunks(*begun[:5]), kernels.Segments(*begun[5:]), keep)


@_finish.register_fake
def _(v: Tensor, entering: Tensor, begun: list[Tensor], keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    states = v.new_empty(*begun[3].shape, v.shape[3]) if keep else v.new_empty(0)
    return v.new_empty(v.shape), entering.new_empty(entering.shape), states


@torch.library.custom_op("megalin::vector_decay_scan_begin_backward", mutates_args=())
def _begin_backward(doutput: Tensor, chunks: list[Tensor]) -> list[Tensor]:
    """First phase: the output's contribution to the gradient of S_in, and Segments for `_finish_backward`."""
    from megalin._triton.scans import vector_decay as kernels

    gradient, segments = kernels.begin_backward(rows(doutput), kernels.Chunks(*chunks))
    return [gradient, *segments]


@_begin_backward.register_fake
def _(doutput: Tensor, chunks: list[Tensor]) -> list[Tensor]:
    (batch, length, heads, value), width = doutput.shape, chunks[3].shape[3]
    gradient = doutput.new_empty(batch, heads, width, value, dtype=torch.float32)
    return [gradient, *_fake_segments(doutput.new_empty(batch, length, heads, width), doutput)]


@torch.library.custom_op("megalin::vector_decay_scan_finish_backward", mutates_args=())
def _finish_backward(
    doutput: Tensor,
    dleaving: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    document_ids: Tensor | None,
    saved: list[Tensor],
    segments: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from megalin._triton.scans import vector_decay as kernels

    chunks, states = kernels.Chunks(*saved[:5]), saved[5]
    inputs = (rows(doutput), dleaving.contiguous(), q, k, v, log_decay, scale, document_ids)
    return kernels.finish_backward(*inputs, chunks, states, kernels.Segments(*segments))[:4]


@_finish_backward.register_fake
def _(
    doutput: Tensor,
    dleaving: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    document_ids: Tensor | None,
    saved: list[Tensor],
    segments: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, _ = _fake_gradients(q, k, v)
    return dq, dk, dv, dg


def two_phase_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    document_ids: Tensor | None,
    shard: SequenceShard,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Output and final state of `scan` on this rank's shard of every sequence; the final state has no gradient."""
    output, state = _TwoPhaseScan.apply(q, k, v, log_decay, document_ids, *shard.documents, shard.exchange, scale, keep)
    return output, state


class _TwoPhaseScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        document_ids: Tensor | None,
        continues: Tensor,
        through: Tensor,
        exchange: StateExchange,
        scale: float,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        added, decay, *begun = _begin(q, k, v, log_decay, document_ids, scale)
        total = decay.log()  # [B, H, K]
        entering = exchange.entering(added, total, ShardDocuments(continues, through))
        output, state, states = _finish(v, entering, begun, keep)
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.scale = exchange, scale
        ctx.save_for_backward(q, k, v, log_decay, document_ids, continues, through, total, *begun[:5], states)
        ctx.mark_non_differentiable(state)
        return output, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, document_ids, continues, through, total, *saved = ctx.saved_tensors
        gradient, *segments = _begin_backward(grads[0], saved[:5])
        leaving = ctx.exchange.leaving_gradient(gradient, total, ShardDocuments(continues, through))
        inputs = (grads[0], leaving, q, k, v, log_decay, document_ids)
        return *_finish_backward(*inputs, saved, segments, ctx.scale), *(None,) * 6


@torch.library.custom_op("megalin::vector_decay_step", mutates_args=())
def step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import vector_decay_step as kernels

    return kernels.step(q, k, v, log_decay, state, scale)


@step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), torch.empty_like(state)
