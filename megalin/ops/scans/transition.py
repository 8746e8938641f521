"""The linear map S -> A S that a run of tokens applies to the state before it, apart from what the tokens add."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Direction = Literal[1, -1]
"""Of a state exchange: 1 sends states to later ranks, -1 sends gradients to earlier ones."""


class ShardDocuments(NamedTuple):
    """Document boundaries of sequences sharded over cp ranks."""

    continues: Tensor
    """[cp, cp, B] bool: rank r (first index) starts in the document that an earlier rank j (second index) ends in."""
    through: Tensor
    """[B] bool: one document fills this rank's shard."""


class Transition(Protocol):
    """A of a rank's shard, in the dtype of the state [B, H, K, V]; constructed from `tensors()`.

    A document boundary inside the shard is no part of it (`ShardDocuments.through`).
    """

    @property
    def num_sent(self) -> int:
        """The number of `tensors()`, the first ones, that are sent; the others are equal on all ranks."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of which A is a function."""
        ...

    def apply(self, state: Tensor) -> Tensor:
        """A S."""
        ...

    def apply_adjoint(self, gradient: Tensor) -> Tensor:
        """A^T dS."""
        ...

    def gradients(self, entering: Tensor, d_leaving: Tensor, through: Tensor) -> tuple[Tensor, ...]:
        """Gradients of `tensors()` from S_in and the gradient of A S_in; zero where no document fills the shard."""
        ...

    def fold(self, x: Tensor, documents: ShardDocuments, *, rank: int, step: Direction) -> Tensor:
        """x_in [B, H, K, V] of a rank, as in `StateExchange`, from all ranks' x [cp, B, H, K, V].

        This transition is then of all ranks: its tensors have cp as first dimension. Every rank traces the same graph.
        """
        ...


class DiagonalDecay(NamedTuple):
    """A = diag(exp(T)), T <= 0 the sum of a shard's log decays."""

    log_decay: Tensor
    """T, [B, H, K or 1], or [H, K or 1] if equal on all ranks."""

    @property
    def num_sent(self) -> int:
        return 0 if self.log_decay.dim() == 2 else 1

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.log_decay,)

    def apply(self, state: Tensor) -> Tensor:
        return torch.exp(self.log_decay)[..., None] * state

    def apply_adjoint(self, gradient: Tensor) -> Tensor:
        return self.apply(gradient)

    def gradients(self, entering: Tensor, d_leaving: Tensor, through: Tensor) -> tuple[Tensor, ...]:
        """dT = sum over V of exp(T) S_in dS."""
        d_decay = (self.apply(entering) * d_leaving).sum(-1).masked_fill(~through[:, None, None], 0.0)
        return (d_decay.sum_to_size(self.log_decay.shape),)

    def fold(self, x: Tensor, documents: ShardDocuments, *, rank: int, step: Direction) -> Tensor:
        """One weighted sum: the weight of a rank's x is exp of the sum of T over the ranks between."""
        totals = self.log_decay[:, None] if self.log_decay.dim() == 3 else self.log_decay  # [cp, B or 1, H, K or 1]
        exponent, continues = _sum_between(totals, documents, rank=rank, step=step)
        weights = torch.exp(exponent).where(continues[..., None, None], 0.0)[..., None]  # [cp, B, H, K or 1, 1]
        return (weights * x).sum(0)


class SelectiveDecay(NamedTuple):
    """A = diag(exp(dt A)) for each of H = D channels, dt the sum of a shard's time steps: of the selective scan."""

    step: Tensor
    """Sum of dt, [B, D]."""
    rates: Tensor
    """A, [D, N], equal on all ranks."""

    @property
    def num_sent(self) -> int:
        return 1

    def tensors(self) -> tuple[Tensor, ...]:
        return self.step, self.rates

    def apply(self, state: Tensor) -> Tensor:
        return torch.exp(self.step[..., None] * self.rates)[..., None] * state

    def apply_adjoint(self, gradient: Tensor) -> Tensor:
        return self.apply(gradient)

    def gradients(self, entering: Tensor, d_leaving: Tensor, through: Tensor) -> tuple[Tensor, ...]:
        """W = exp(dt A) S_in dS: d dt = sum over N of W A, dA = sum over B of W dt."""
        weight = (self.apply(entering) * d_leaving).sum(-1).masked_fill(~through[:, None, None], 0.0)  # [B, D, N]
        return (weight * self.rates).sum(-1), (weight * self.step[..., None]).sum(0)

    def fold(self, x: Tensor, documents: ShardDocuments, *, rank: int, step: Direction) -> Tensor:
        """One weighted sum, as in `DiagonalDecay`; the sums between ranks are of dt."""
        between, continues = _sum_between(self.step, documents, rank=rank, step=step)  # [cp, B, D]
        weights = torch.exp(between[..., None] * self.rates[0]).where(continues[..., None, None], 0.0)[..., None]
        return (weights * x).sum(0)


class TwoSidedDecay(NamedTuple):
    """A S = diag(exp(T)) S diag(exp(U)), T and U <= 0 the sums of a shard's log decays along keys and values."""

    log_key_decay: Tensor
    """T, [B, H, K]."""
    log_value_decay: Tensor
    """U, [B, H, V]."""

    @property
    def num_sent(self) -> int:
        return 2

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.log_key_decay, self.log_value_decay)

    def apply(self, state: Tensor) -> Tensor:
        return torch.exp(self.log_key_decay)[..., None] * state * torch.exp(self.log_value_decay)[..., None, :]

    def apply_adjoint(self, gradient: Tensor) -> Tensor:
        return self.apply(gradient)

    def gradients(self, entering: Tensor, d_leaving: Tensor, through: Tensor) -> tuple[Tensor, ...]:
        """dT and dU = sums over V and K of A S_in dS."""
        product = (self.apply(entering) * d_leaving).masked_fill(~through[:, None, None, None], 0.0)
        return product.sum(-1), product.sum(-2)

    def fold(self, x: Tensor, documents: ShardDocuments, *, rank: int, step: Direction) -> Tensor:
        """One weighted sum, as in `DiagonalDecay`, with a weight along each side."""
        keys, continues = _sum_between(self.log_key_decay, documents, rank=rank, step=step)  # [cp, B, H, K]
        values, _ = _sum_between(self.log_value_decay, documents, rank=rank, step=step)  # [cp, B, H, V]
        weights = torch.exp(keys).where(continues[..., None, None], 0.0)
        return (weights[..., None] * x * torch.exp(values)[..., None, :]).sum(0)


def _sum_between(totals: Tensor, documents: ShardDocuments, *, rank: int, step: Direction) -> tuple[Tensor, Tensor]:
    """The sum of totals [cp, B or 1, ...] over the ranks between each rank and this one, and [cp, B] whether one
    document joins the two in the direction `step`."""
    others = torch.arange(len(totals), device=totals.device)
    if step == 1:
        between = (others[:, None] < others) & (others < rank)  # [j, i]
        continues = documents.continues[rank]
    else:
        between = (others > rank) & (others < others[:, None])  # [r, i]
        continues = documents.continues[:, rank]
    masks = between.view(*between.shape, *(1,) * (totals.dim() - 1))
    return totals.where(masks, 0.0).sum(1), continues
