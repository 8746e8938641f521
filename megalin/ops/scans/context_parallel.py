"""State exchange of scans whose sequences are sharded over ranks: the state entering a shard, and its adjoint.

    S_in(r) = sum over j < r of W_rj S_j,    dS_j = sum over r > j of W_rj dS_in(r),
    W_rj = exp(sum of T_i over j < i < r) where r continues j's document, else 0

with S_j the final state of rank j's shard computed from a zero initial state, and T_j the sum of its log decays. dS_j
is the gradient of the state that leaves rank j. Given S_in and dS_j, a shard is a sequence of its own, with the initial
state S_in and the gradient dS_j of its final state (docs/adr/0016).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class ShardDocuments(NamedTuple):
    """Document boundaries of sequences sharded over cp ranks."""

    continues: Tensor
    """[cp, cp, B] bool: rank r (first index) starts in the document that an earlier rank j (second index) ends in."""
    through: Tensor
    """[B] bool: one document fills this rank's shard."""


class StateExchange(Protocol):
    """State exchange between the ranks of a context-parallel group, by an all-gather or a ring; no autograd.

    `log_decay` is T of this rank's shard, <= 0, in the dtype of the state: [B, H, K or 1], or [H, K or 1] if equal on
    every rank, which is never sent.
    """

    def entering(self, state: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        """Forward: S [B, H, K, V] -> S_in [B, H, K, V]; zero on the first rank and where a document starts."""
        ...

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        """Backward: dS_in [B, H, K, V] -> dS [B, H, K, V]; zero on the last rank and where a document ends."""
        ...


class SequenceShard(NamedTuple):
    """This rank's shard of every sequence under context parallelism."""

    exchange: StateExchange
    documents: ShardDocuments

    def fold(self, state: Tensor, log_decay: Tensor) -> Tensor:
        """S_in [B, H, K, V] from this rank's S and T, differentiable in both: one state exchange forward, one backward.

        Args:
            state: S [B, H, K, V], in at least fp32.
            log_decay: T as in `StateExchange`, in any dtype.
        """
        entering: Tensor = _Fold.apply(state, log_decay.to(state.dtype), *self.documents, self.exchange)
        return entering


class _Fold(torch.autograd.Function):
    """Autograd of `fold`: dT = sum over V of exp(T) S_in dS where one document fills the shard, else 0."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, log_decay: Tensor, continues: Tensor, through: Tensor, exchange: StateExchange
    ) -> Tensor:
        entering = exchange.entering(state, log_decay, ShardDocuments(continues, through))
        ctx.exchange = exchange
        ctx.save_for_backward(entering, log_decay, continues, through)
        return entering

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        entering, log_decay, continues, through = ctx.saved_tensors
        d_state = ctx.exchange.leaving_gradient(grads[0], log_decay, ShardDocuments(continues, through))
        d_decay = None
        if ctx.needs_input_grad[1]:
            passed = torch.exp(log_decay)[..., None] * entering * d_state
            d_decay = passed.sum(-1).masked_fill(~through[:, None, None], 0.0).sum_to_size(log_decay.shape)
        return d_state, d_decay, None, None, None


class SingleProcessExchange:
    """`StateExchange` in one process, for tests: sample r of the batch is rank r's shard of one sequence."""

    def sequence_shard(self, document_ids: Tensor) -> SequenceShard:
        """The shards of one sequence with document_ids [cp, T]."""
        first, last = document_ids[:, 0], document_ids[:, -1]
        return SequenceShard(self, ShardDocuments((first[:, None] == last).tril(-1)[..., None], first == last))

    def entering(self, state: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        return self._received(state, log_decay, documents, list(range(len(state))))

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, documents: ShardDocuments) -> Tensor:
        return self._received(gradient, log_decay, documents, list(range(len(gradient)))[::-1])

    def _received(self, x: Tensor, log_decay: Tensor, documents: ShardDocuments, order: list[int]) -> Tensor:
        passed = log_decay.exp().expand(*x.shape[:2], -1)[..., None] * documents.through[:, None, None, None]
        received = torch.zeros_like(x)
        for rank, next_rank in pairwise(order):
            continues = documents.continues[max(rank, next_rank), min(rank, next_rank)]
            received[next_rank] = (x[rank] + passed[rank] * received[rank]) * continues
        return received
