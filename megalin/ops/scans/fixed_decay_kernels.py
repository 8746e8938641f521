"""torch.library ops of the fixed-decay scan: the scan, the two-phase scan around a state exchange, and the step.

The first phase, forward and backward, needs no data of other ranks (docs/adr/0016).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megalin.ops.scans import fixed_decay_cuda
from megalin.ops.scans.context_parallel import SequenceShard, ShardDocuments, StateExchange


def _kernels(backend: str) -> ModuleType:
    if backend == "cuda":
        return fixed_decay_cuda
    from megalin._triton.scans import fixed_decay

    return fixed_decay


@torch.library.custom_op("megalin::decay_scan", mutates_args=())
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    initial: Tensor | None,
    documents: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output, final state, and the states entering the blocks of the sequence (empty for one block)."""
    return _kernels(backend).forward(
        q, k, v, slopes, *(None if x is None else x.contiguous() for x in (initial, documents))
    )


@scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    initial: Tensor | None,
    documents: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_results(k, v, backend)


def _fake_results(k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    (batch, length, heads, key), value = k.shape, v.shape[-1]
    state = k.new_empty(batch, heads, key, value, dtype=torch.float32)
    return v.new_empty(v.shape), state, state.new_empty(_kernels(backend).saved_shape(batch, length, heads, key, value))


@torch.library.custom_op("megalin::decay_scan_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    initial: Tensor | None,
    documents: Tensor | None,
    states: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    initial, documents, d_state = (None if x is None else x.contiguous() for x in (initial, documents, d_state))
    return _kernels(backend).backward(d_output, d_state, q, k, v, slopes, initial, documents, states)


@_backward.register_fake
def _(
    d_output: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    initial: Tensor | None,
    documents: Tensor | None,
    states: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, _, heads, key), value = k.shape, v.shape[-1]
    d_initial = k.new_empty(batch, heads, key, value, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])


def _differentiate(
    ctx: Any, d_output: Tensor | None, d_state: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, slopes, initial, documents, states = ctx.saved_tensors
    d_output = torch.zeros_like(v) if d_output is None else d_output
    dq, dk, dv, d_initial = _backward(d_output, d_state, q, k, v, slopes, initial, documents, states, ctx.backend)
    return dq, dk, dv, None, None if initial is None else d_initial, None, None


scan.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("megalin::decay_scan_begin", mutates_args=())
def _begin(
    k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None, reverse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """First phase: the state update of all tokens [B, H, K, V] fp32, and that of each part. `reverse`, with q and the
    output's gradient as k and v: the updates of the state's gradient."""
    documents = None if documents is None else documents.contiguous()
    return _kernels(backend).begin(k, v, slopes, documents, reverse=reverse)


@_begin.register_fake
def _(
    k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None, reverse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    batch, heads, _, *sizes = shape = _kernels(backend).parts_shape(*k.shape, v.shape[3], reverse=reverse)
    total = k.new_empty(batch, heads, *sizes, dtype=torch.float32)
    return total, total.new_empty(shape)


@torch.library.custom_op("megalin::decay_scan_finish", mutates_args=())
def _finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    entering: Tensor,
    documents: Tensor | None,
    parts: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase: returns what `scan` does."""
    documents = None if documents is None else documents.contiguous()
    return _kernels(backend).forward(q, k, v, slopes, entering.contiguous(), documents, parts)


@_finish.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    entering: Tensor,
    documents: Tensor | None,
    parts: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_results(k, v, backend)


@torch.library.custom_op("megalin::decay_scan_finish_backward", mutates_args=())
def _finish_backward(
    d_output: Tensor,
    d_leaving: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    entering: Tensor,
    documents: Tensor | None,
    states: Tensor,
    parts: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    documents = None if documents is None else documents.contiguous()
    inputs = (d_output, d_leaving.contiguous(), q, k, v, slopes, entering.contiguous(), documents, states, parts)
    return _kernels(backend).backward(*inputs)[:3]


@_finish_backward.register_fake
def _(
    d_output: Tensor,
    d_leaving: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    entering: Tensor,
    documents: Tensor | None,
    states: Tensor,
    parts: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def total_decay(k: Tensor, slopes: Tensor | None) -> Tensor:
    """Sum of the log decays over the tokens of k [B, T, H, K]: [H, 1]."""
    if slopes is None:
        return k.new_zeros(k.shape[2], 1, dtype=torch.float32)
    return -k.shape[1] * slopes[:, None]


def two_phase_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    document_ids: Tensor | None,
    shard: SequenceShard,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output and final state of `scan` on this rank's shard of every sequence; the final state has no gradient."""
    output, state = _TwoPhaseScan.apply(q, k, v, slopes, document_ids, *shard.documents, shard.exchange, backend)
    return output, state


class _TwoPhaseScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        document_ids: Tensor | None,
        continues: Tensor,
        through: Tensor,
        exchange: StateExchange,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        added, parts = _begin(k, v, slopes, document_ids, False, backend)
        entering = exchange.entering(added, total_decay(k, slopes), ShardDocuments(continues, through))
        output, state, states = _finish(q, k, v, slopes, entering, document_ids, parts, backend)
        ctx.exchange, ctx.backend = exchange, backend
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, slopes, document_ids, continues, through, entering, states)
        ctx.mark_non_differentiable(state)
        return output, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, slopes, document_ids, continues, through, entering, states = ctx.saved_tensors
        gradient, parts = _begin(q, grads[0], slopes, document_ids, True, ctx.backend)
        leaving = ctx.exchange.leaving_gradient(gradient, total_decay(k, slopes), ShardDocuments(continues, through))
        inputs = (grads[0], leaving, q, k, v, slopes, entering, document_ids, states, parts, ctx.backend)
        return *_finish_backward(*inputs), *(None,) * 6


@torch.library.custom_op("megalin::decay_step", mutates_args=())
def step(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, state: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import fixed_decay_step as kernels

    return kernels.step(*(x.contiguous() for x in (q, k, v)), slopes, state.contiguous())


@step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, state: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)
