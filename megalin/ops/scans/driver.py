"""Forward and backward of scans by kernels: two phases each, around the state exchange of a sharded sequence.

The first phase needs no state from outside the sequence; the second one starts from the entering state, forward, and
from the gradient of the leaving state, backward (docs/adr/0016, 0017). Without a shard nothing is exchanged: the
entering state is the initial state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megalin.ops.scans.context_parallel import SequenceShard, StateExchange
from megalin.ops.scans.limits import WIDTH_UNIT, padded
from megalin.ops.scans.transition import ShardDocuments, Transition

Inputs = Sequence[Any]
"""Tensors, and None for omitted ones: q, k, v, then the scan's own, such as decays and document ids."""


class ScanOutput(NamedTuple):
    """Outputs [B, T, H, V] in the dtype of v, and the state [B, H, K, V] after the last token in at least fp32."""

    output: Tensor
    state: Tensor


class Begun(NamedTuple):
    """Results of a first phase."""

    exchanged: tuple[Tensor, Transition] | None
    """The tokens' own state or gradient of a state [B, H, K, V], and their transition; None if nothing is exchanged."""
    handed: Sequence[Tensor]
    """Intermediates from which the second phase goes on."""


class Finished(NamedTuple):
    """Results of the forward's second phase."""

    output: Tensor
    state: Tensor
    saved: Inputs
    """Tensors for the backward, besides the inputs."""


class ScanKernels(Protocol):
    """Both phases of a scan on one backend, as custom ops without autograd. Every scan and backend has one object.

    `exchange`: whether the first phase forms what is exchanged; if not, it skips the last segment.
    """

    def begin(self, inputs: Inputs, *, exchange: bool) -> Begun:
        """First phase of the forward."""
        ...

    def finish(self, inputs: Inputs, entering: Tensor | None, begun: Begun, *, keep: bool) -> Finished:
        """Second phase, from the entering state [B, H, K, V], None for zero. `keep`: a backward may follow."""
        ...

    def begin_backward(self, d_output: Tensor, inputs: Inputs, saved: Inputs, *, exchange: bool) -> Begun:
        """First phase of the backward."""
        ...

    def finish_backward(
        self, d_output: Tensor, d_leaving: Tensor | None, inputs: Inputs, saved: Inputs, begun: Begun
    ) -> tuple[Sequence[Tensor | None], Tensor]:
        """Second phase, from the gradient of the leaving state [B, H, K, V], None for zero: the gradient of every
        input, and that of the entering state [B, H, K, V]."""
        ...


def run_scan(
    kernels: ScanKernels,
    inputs: Inputs,
    *,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    state_gradient: bool = True,
) -> ScanOutput:
    """Runs a scan, differentiable in `inputs` and `initial_state`.

    Args:
        initial_state: [B, H, K, V] fp32, not with a shard; None for zeros.
        shard: this rank's shard under context parallelism; its final state has no gradient.
        state_gradient: whether the final state of a full sequence has a gradient. Where none is used, torch.compile
            would pass zeros to the kernels.
    """
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, initial_state))
    exchange, documents = (None, (None, None)) if shard is None else shard
    output, state = _Scan.apply(kernels, exchange, keep, state_gradient, *documents, initial_state, *inputs)
    return ScanOutput(output, state)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: ScanKernels,
        exchange: StateExchange | None,
        keep: bool,
        state_gradient: bool,
        continues: Tensor | None,
        through: Tensor | None,
        initial_state: Tensor | None,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        begun = kernels.begin(inputs, exchange=exchange is not None)
        entering = initial_state if exchange is None else exchange.entering(*_exchanged(begun, continues, through))
        output, state, saved = kernels.finish(inputs, entering, begun, keep=keep)
        ctx.kernels, ctx.exchange, ctx.num_inputs = kernels, exchange, len(inputs)
        ctx.has_initial_state, ctx.state_gradient = initial_state is not None, state_gradient and exchange is None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(continues, through, *inputs, *saved)
        if not ctx.state_gradient:
            ctx.mark_non_differentiable(state)
        return output, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kernels, exchange = ctx.kernels, ctx.exchange
        continues, through, *others = ctx.saved_tensors
        inputs, saved = others[: ctx.num_inputs], others[ctx.num_inputs :]
        d_output = torch.zeros_like(inputs[2]) if grads[0] is None else grads[0]
        begun = kernels.begin_backward(d_output, inputs, saved, exchange=exchange is not None)
        d_leaving = grads[1] if ctx.state_gradient else None
        if exchange is not None:
            d_leaving = exchange.leaving_gradient(*_exchanged(begun, continues, through))
        gradients, d_entering = kernels.finish_backward(d_output, d_leaving, inputs, saved, begun)
        return *(None,) * 6, d_entering if ctx.has_initial_state else None, *gradients


def _exchanged(
    begun: Begun, continues: Tensor | None, through: Tensor | None
) -> tuple[Tensor, Transition, ShardDocuments]:
    assert begun.exchanged is not None
    assert continues is not None
    assert through is not None
    return *begun.exchanged, ShardDocuments(continues, through)


def fold(state: Tensor, transition: Transition, shard: SequenceShard) -> Tensor:
    """S_in [B, H, K, V] of this rank, differentiable in S and the transition: one state exchange each way.

    For states that no kernel of two phases computes.

    Args:
        state: S [B, H, K, V], in at least fp32.
        transition: of this rank's shard, its tensors in any dtype.
    """
    tensors = [x.to(state.dtype) for x in transition.tensors()]
    entering: Tensor = _Fold.apply(type(transition), shard.exchange, *shard.documents, state, *tensors)
    return entering


def fold_padded(state: Tensor, transition: Transition, shard: SequenceShard) -> Tensor:
    """`fold` of a state with one decay per head, in the padded widths of the kernels: ranks with kernels and ranks
    without them exchange the same shapes."""
    key, value = state.shape[-2:]
    wide = padded(state, -value % WIDTH_UNIT, -key % WIDTH_UNIT)
    entering = fold(wide, transition, shard)
    return entering if wide is state else entering[..., :key, :value]


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: Any,
        exchange: StateExchange,
        continues: Tensor,
        through: Tensor,
        state: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        entering = exchange.entering(state, kind(*tensors), ShardDocuments(continues, through))
        ctx.kind, ctx.exchange = kind, exchange
        ctx.save_for_backward(continues, through, entering, *tensors)
        return entering

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        continues, through, entering, *tensors = ctx.saved_tensors
        transition = ctx.kind(*tensors)
        d_state = ctx.exchange.leaving_gradient(grads[0], transition, ShardDocuments(continues, through))
        gradients: Sequence[Tensor | None] = (None,) * len(tensors)
        if any(ctx.needs_input_grad[5:]):
            gradients = transition.gradients(entering, d_state, through)
        return None, None, None, None, d_state, *gradients
