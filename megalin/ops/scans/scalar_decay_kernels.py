"""torch.library ops of the scalar-decay scan: the scan, and the two-phase scan around a state exchange.

The first phase, forward and backward, needs no data of other ranks (docs/adr/0016).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalin.ops.scans.context_parallel import SequenceShard, ShardDocuments, StateExchange


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


@torch.library.custom_op("megalin::scalar_decay_scan", mutates_args=())
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    documents: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    return kernels.forward(q, k, v, log_decay.contiguous(), *_contiguous(initial, documents))


@scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    documents: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    (batch, _, heads, value), key = v.shape, k.shape[-1]
    state = v.new_empty(batch, heads, key, value, dtype=torch.float32)
    return v.new_empty(v.shape), state, state.new_empty(kernels.saved_shape(k, v))


@torch.library.custom_op("megalin::scalar_decay_scan_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    documents: Tensor | None,
    saved: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    initial, documents, d_state = _contiguous(initial, documents, d_state)
    return kernels.backward(d_output, d_state, q, k, v, log_decay.contiguous(), initial, documents, saved)


@_backward.register_fake
def _(
    d_output: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    documents: Tensor | None,
    saved: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (batch, _, heads, value), key = v.shape, k.shape[-1]
    d_initial = v.new_empty(batch, heads, key, value, dtype=torch.float32)
    gradients = [x.new_empty(x.shape) for x in (q, k, v, log_decay)]
    return gradients[0], gradients[1], gradients[2], gradients[3], d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(
    ctx: Any, d_output: Tensor | None, d_state: Tensor | None, d_saved: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, initial, documents, saved = ctx.saved_tensors
    d_output = torch.zeros_like(v) if d_output is None else d_output
    *gradients, d_initial = _backward(d_output, d_state, q, k, v, log_decay, initial, documents, saved, ctx.backend)
    return *gradients, None if initial is None else d_initial, None, None


scan.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("megalin::scalar_decay_scan_begin", mutates_args=())
def _begin(k: Tensor, v: Tensor, log_decay: Tensor, documents: Tensor | None) -> list[Tensor]:
    """First phase: the final state from a zero initial state, the total decay, and Decays and Parts for `_finish`."""
    from megalin._triton.scans import scalar_decay as kernels

    state, decay, found, parts = kernels.begin(k, v, log_decay.contiguous(), *_contiguous(documents))
    return [state, decay, *found, *parts]


@_begin.register_fake
def _(k: Tensor, v: Tensor, log_decay: Tensor, documents: Tensor | None) -> list[Tensor]:
    state = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    return [state, state.new_empty(state.shape[:2]), *_fake_begun(k, v, log_decay)]


def _fake_begun(k: Tensor, v: Tensor, log_decay: Tensor) -> list[Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    found, parts = kernels.empty_intermediates(k, v, log_decay)
    return [*found, *parts]


@torch.library.custom_op("megalin::scalar_decay_scan_finish", mutates_args=())
def _finish(
    q: Tensor, k: Tensor, v: Tensor, entering: Tensor, documents: Tensor | None, begun: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase: returns what `scan` does."""
    from megalin._triton.scans import scalar_decay as kernels

    found, parts = kernels.Decays(*begun[:4]), kernels.Parts(*begun[4:])
    return kernels.finish(q, k, v, *_contiguous(entering, documents), found, parts)


@_finish.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, entering: Tensor, documents: Tensor | None, begun: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    return v.new_empty(v.shape), entering.new_empty(entering.shape), entering.new_empty(kernels.saved_shape(k, v))


@torch.library.custom_op("megalin::scalar_decay_scan_begin_backward", mutates_args=())
def _begin_backward(d_output: Tensor, q: Tensor, log_decay: Tensor, documents: Tensor | None) -> list[Tensor]:
    """First phase: the output's contribution to the gradient of S_in, and Decays and Parts for `_finish_backward`."""
    from megalin._triton.scans import scalar_decay as kernels

    gradient, found, parts = kernels.begin_backward(d_output, q, log_decay.contiguous(), *_contiguous(documents))
    return [gradient, *found, *parts]


@_begin_backward.register_fake
def _(d_output: Tensor, q: Tensor, log_decay: Tensor, documents: Tensor | None) -> list[Tensor]:
    (batch, _, heads, value), key = d_output.shape, q.shape[3]
    return [d_output.new_empty(batch, heads, key, value, dtype=torch.float32), *_fake_begun(q, d_output, log_decay)]


@torch.library.custom_op("megalin::scalar_decay_scan_finish_backward", mutates_args=())
def _finish_backward(
    d_output: Tensor,
    d_leaving: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    entering: Tensor,
    documents: Tensor | None,
    saved: Tensor,
    begun: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    found, parts = kernels.Decays(*begun[:4]), kernels.Parts(*begun[4:])
    states = _contiguous(d_leaving, entering, documents)
    inputs = (d_output, states[0], q, k, v, log_decay.contiguous(), *states[1:])
    return kernels.finish_backward(*inputs, saved, found, parts)[:4]


@_finish_backward.register_fake
def _(
    d_output: Tensor,
    d_leaving: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    entering: Tensor,
    documents: Tensor | None,
    saved: Tensor,
    begun: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), log_decay.new_empty(log_decay.shape)


def two_phase_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, document_ids: Tensor | None, shard: SequenceShard
) -> tuple[Tensor, Tensor]:
    """Output and final state of `scan` on this rank's shard of every sequence; the final state has no gradient."""
    output, state = _TwoPhaseScan.apply(q, k, v, log_decay, document_ids, *shard.documents, shard.exchange)
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
    ) -> tuple[Tensor, Tensor]:
        added, decay, *begun = _begin(k, v, log_decay, document_ids)
        total = decay.log()[..., None]  # [B, H, 1]
        entering = exchange.entering(added, total, ShardDocuments(continues, through))
        output, state, saved = _finish(q, k, v, entering, document_ids, begun)
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, log_decay, document_ids, continues, through, total, entering, saved)
        ctx.mark_non_differentiable(state)
        return output, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, document_ids, continues, through, total, entering, saved = ctx.saved_tensors
        gradient, *begun = _begin_backward(grads[0], q, log_decay, document_ids)
        leaving = ctx.exchange.leaving_gradient(gradient, total, ShardDocuments(continues, through))
        inputs = (grads[0], leaving, q, k, v, log_decay, entering, document_ids, saved, begun)
        return *_finish_backward(*inputs), None, None, None, None
