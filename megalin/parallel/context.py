"""The context-parallel axis: each rank holds T/cp neighbouring tokens, and what came before them is folded from the
states of the ranks before.

    S_in(0) = 0,    S_in(r + 1) = exp(T_r) S_in(r) + S_r

with S_r what the tokens of rank r leave behind when they start from zero, and T_r the sum of their log decays. States
are exchanged once each way, and their size does not depend on the number of tokens. Documents: S_r is of the last
document of the shard, and reaches the ranks whose first token continues that document.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.parallel.collectives import Axis, all_gather, gather_from_axis, local_slice

TOKENS = 1
"""The dimension of [B, T, ...] along which the sequence is split."""


class Borders(NamedTuple):
    """How the documents of a batch lie on the ranks."""

    continues: Tensor
    """[cp, cp, B] bool: rank r (first) starts in the document that an earlier rank j (second) ends with."""
    through: Tensor
    """[B] bool: this rank's tokens are of one document."""


class ContextParallel:
    """The context-parallel axis: its size, and what crosses from shard to shard. The default has size 1."""

    def __init__(self, axis: Axis | None = None) -> None:
        self.axis = Axis("cp") if axis is None else axis

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.axis.size

    def shard(self, x: Tensor) -> Tensor:
        """This rank's tokens of a whole row: [B, T, ...] -> [B, T/cp, ...], a view."""
        assert x.shape[TOKENS] % self.size == 0, (x.shape, self.size)
        return local_slice(x, self.axis, dim=TOKENS)

    def positions(self, tokens: Tensor) -> Tensor:
        """[T/cp] numbers of this rank's tokens [B, T/cp] in the whole row."""
        length = tokens.shape[TOKENS]
        return torch.arange(length, device=tokens.device) + self.axis.rank * length

    def borders(self, tokens: Tensor, document_ids: Tensor | None) -> Borders | None:
        """Exchanges the documents at the ends of the shards, once a batch; None on an axis of size 1.

        Args:
            tokens: [B, T/cp].
            document_ids: [B, T/cp], non-decreasing over the whole row; None when each row is one document.
        """
        if self.size == 1:
            return None
        if document_ids is None:
            document_ids = torch.zeros_like(tokens)
            ends = document_ids.new_zeros(self.size, 2, tokens.shape[0])
        else:
            own = torch.stack([document_ids[:, 0], document_ids[:, -1]])
            ends = all_gather(own, self.axis, dim=0).unflatten(0, (self.size, 2))  # [cp, 2, B]
        earlier = torch.ones(self.size, self.size, dtype=torch.bool, device=tokens.device).tril(-1)
        same = ends[:, None, 0] == ends[None, :, 1]  # [cp, cp, B]
        return Borders(same & earlier[..., None], document_ids[:, 0] == document_ids[:, -1])

    def fold(self, state: Tensor, log_decay: Tensor, borders: Borders) -> Tensor:
        """The state that enters this rank's tokens, of the document of the first of them.

        One all-gather forward and one backward, in the dtype of the state; `log_decay` may have a gradient.

        Args:
            state: S_r [B, H, K, V], what this rank's tokens leave behind, in at least fp32.
            log_decay: T_r, the sum of the log decays over all this rank's tokens, <= 0: [B, H, K or 1], or
                [H, K or 1] where it is equal on every rank, and then not sent.
            borders: as `borders` returns them.

        Returns:
            S_in [B, H, K, V]; zero on the first rank and where a document starts.
        """
        entering: Tensor = _Fold.apply(state, log_decay.to(state.dtype), *borders, self.axis)
        return entering

    def halo(self, x: Tensor, borders: Borders, document_ids: Tensor | None, *, width: int) -> Tensor:
        """The `width` inputs before this rank's tokens, zero where they are of another document than the first token,
        and before the row: x [B, T/cp, D] -> [B, width, D]. An all-gather of `width` tokens a rank forward, a
        reduce-scatter backward."""
        num = min(width, x.shape[TOKENS])
        tail = x[:, -num:]
        if document_ids is not None:
            tail = tail.masked_fill((document_ids[:, -num:] != document_ids[:, -1:])[..., None], 0.0)
        tails = gather_from_axis(tail, self.axis, dim=TOKENS)  # [B, cp * num, D]
        seen = borders.continues[self.axis.rank].T.repeat_interleave(num, dim=1)  # [B, cp * num]
        known = functional.pad(tails.masked_fill(~seen[..., None], 0.0), (0, 0, width, 0))
        return known.narrow(TOKENS, self.axis.rank * num, width)


class _Fold(torch.autograd.Function):
    """S_in(r) = sum over j < r of W_rj S_j with W_rj = exp(sum of T_i over j < i < r) where r continues j's document.

    dS_j = sum over r > j of W_rj dS_in(r): the gradient of the state that leaves rank j, so that
    dT_j = sum over V of exp(T_j) S_in(j) dS_j where one document fills the shard.
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, log_decay: Tensor, continues: Tensor, through: Tensor, axis: Axis) -> Tensor:
        if log_decay.dim() == 2:
            states = all_gather(state[None], axis, dim=0)  # [cp, B, H, K, V]
            totals = log_decay.expand(axis.size, 1, *log_decay.shape)  # [cp, 1, H, K or 1]
        else:
            # The decay is one more column of values.
            column = log_decay[..., None].expand(*state.shape[:-1], 1)
            gathered = all_gather(torch.cat([state, column], dim=-1)[None], axis, dim=0)
            states, totals = gathered[..., :-1], gathered[..., -1]
        others = torch.arange(axis.size, device=state.device)
        between = (others[:, None] < others) & (others < axis.rank)  # [j, i]
        entering = (_weights(totals, between, continues[axis.rank]) * states).sum(0)
        ctx.axis, ctx.decay_shape = axis, log_decay.shape
        ctx.save_for_backward(entering, totals, continues, through)
        return entering

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        entering, totals, continues, through = ctx.saved_tensors
        axis = ctx.axis
        gathered = all_gather(grads[0][None], axis, dim=0)  # [cp, B, H, K, V]
        others = torch.arange(axis.size, device=entering.device)
        between = (others > axis.rank) & (others < others[:, None])  # [r, i]
        d_state = (_weights(totals, between, continues[:, axis.rank]) * gathered).sum(0)
        d_decay = None
        if ctx.needs_input_grad[1]:
            passed = torch.exp(totals[axis.rank])[..., None] * entering * d_state
            d_decay = passed.sum(-1).masked_fill(~through[:, None, None], 0.0).sum_to_size(ctx.decay_shape)
        return d_state, d_decay, None, None, None


def _weights(totals: Tensor, between: Tensor, continues: Tensor) -> Tensor:
    """exp(sum of T_i over the ranks i between) where the document continues, else 0: [cp, B, H, K or 1, 1].

    Args:
        totals: T [cp, B or 1, H, K or 1].
        between: [cp, cp] bool, for each other rank those between it and this one.
        continues: [cp, B] bool.
    """
    exponent = totals.where(between[..., None, None, None], 0.0).sum(1)
    return torch.exp(exponent).where(continues[..., None, None], 0.0)[..., None]
