"""Rows of tokens that are split over ranks, as scans see them: what enters a rank's tokens, and the adjoint of that.

    S_in(r) = sum over j < r of W_rj S_j,    dS_j = sum over r > j of W_rj dS_in(r),
    W_rj = exp(sum of T_i over j < i < r) where r continues j's document, else 0

with S_j what the tokens of rank j leave behind when they start from zero, and T_j the sum of their log decays. dS_j is
the gradient of the state that leaves rank j. A scan that is given S_in and dS_j needs nothing else of the other ranks:
it is a scan of a row of its own, whose first state is S_in and whose last has the gradient dS_j (docs/adr/0016).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class ShardDocuments(NamedTuple):
    """How the documents of a batch lie on the ranks."""

    continues: Tensor
    """[cp, cp, B] bool: rank r (first) starts in the document that an earlier rank j (second) ends with."""
    through: Tensor
    """[B] bool: this rank's tokens are of one document."""


class StateExchange(Protocol):
    """The exchange of states between the ranks of a row, one each way; no autograd.

    `log_decay` is T of this rank's tokens, <= 0, in the dtype of the state: [B, H, K or 1], or [H, K or 1] where it is
    equal on every rank, and then never sent.
    """

    def entering(self, state: Tensor, log_decay: Tensor, borders: ShardDocuments) -> Tensor:
        """S_in [B, H, K, V] of S [B, H, K, V]; zero on the first rank and where a document starts."""
        ...

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, borders: ShardDocuments) -> Tensor:
        """dS [B, H, K, V] of dS_in [B, H, K, V]; zero on the last rank and where a document ends."""
        ...


class SequenceShard(NamedTuple):
    """That a rank holds a part of each row."""

    ranks: StateExchange
    borders: ShardDocuments

    def fold(self, state: Tensor, log_decay: Tensor) -> Tensor:
        """S_in [B, H, K, V] of this rank's S and T, with gradients for both: one exchange each way.

        Args:
            state: S [B, H, K, V], in at least fp32.
            log_decay: T as `StateExchange` has it, in any dtype.
        """
        entering: Tensor = _Fold.apply(state, log_decay.to(state.dtype), *self.borders, self.ranks)
        return entering


class _Fold(torch.autograd.Function):
    """dT = sum over V of exp(T) S_in dS where one document fills the shard."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, log_decay: Tensor, continues: Tensor, through: Tensor, ranks: StateExchange
    ) -> Tensor:
        entering = ranks.entering(state, log_decay, ShardDocuments(continues, through))
        ctx.ranks = ranks
        ctx.save_for_backward(entering, log_decay, continues, through)
        return entering

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        entering, log_decay, continues, through = ctx.saved_tensors
        d_state = ctx.ranks.leaving_gradient(grads[0], log_decay, ShardDocuments(continues, through))
        d_decay = None
        if ctx.needs_input_grad[1]:
            passed = torch.exp(log_decay)[..., None] * entering * d_state
            d_decay = passed.sum(-1).masked_fill(~through[:, None, None], 0.0).sum_to_size(log_decay.shape)
        return d_state, d_decay, None, None, None


class SingleProcessExchange:
    """`StateExchange` in one process, for tests: batch row r holds the tokens of rank r of one sequence."""

    def split(self, document_ids: Tensor) -> SequenceShard:
        """For document_ids [cp, T]."""
        first, last = document_ids[:, 0], document_ids[:, -1]
        return SequenceShard(self, ShardDocuments((first[:, None] == last).tril(-1)[..., None], first == last))

    def entering(self, state: Tensor, log_decay: Tensor, borders: ShardDocuments) -> Tensor:
        return self._received(state, log_decay, borders, list(range(len(state))))

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, borders: ShardDocuments) -> Tensor:
        return self._received(gradient, log_decay, borders, list(range(len(gradient)))[::-1])

    def _received(self, x: Tensor, log_decay: Tensor, borders: ShardDocuments, order: list[int]) -> Tensor:
        passed = log_decay.exp().expand(*x.shape[:2], -1)[..., None] * borders.through[:, None, None, None]
        received = torch.zeros_like(x)
        for rank, next_rank in pairwise(order):
            continues = borders.continues[max(rank, next_rank), min(rank, next_rank)]
            received[next_rank] = (x[rank] + passed[rank] * received[rank]) * continues
        return received
