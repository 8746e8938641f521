"""The context-parallel axis: each rank holds T/cp neighbouring tokens, and what came before them is folded from the
states of the ranks before.

    S_in(0) = 0,    S_in(r + 1) = exp(T_r) S_in(r) + S_r

with S_r what the tokens of rank r leave behind when they start from zero, and T_r the sum of their log decays. States
are exchanged once each way, and their size does not depend on the number of tokens. Documents: S_r is of the last
document of the shard, and reaches the ranks whose first token continues that document.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.scans.context_parallel import SequenceShard, ShardDocuments
from megalin.parallel.collectives import (
    Axis,
    all_gather,
    all_to_all_over_axis,
    copy_to_axis,
    gather_from_axis,
    local_slice,
    reduce_from_axis,
    reduce_scatter_to_axis,
)
from megalin.parallel.state_passing import Direction, all_gather_states, ring_states
from megalin.parallel.tensor_parallel import TensorParallel

ExchangeName = Literal["auto", "all_gather", "ring", "pipelined"]

TOKENS = 1
"""The dimension of [B, T, ...] along which the sequence is split."""


class FullSequenceInfo(NamedTuple):
    """What a rank knows of all tokens of its rows, those of the other ranks too."""

    document_ids: Tensor | None
    """[B, T], non-decreasing; None where each row is one document."""
    valid: Tensor | None
    """[B, T] bool, False where a token is padding; None where all tokens count."""


class ContextParallel:
    """The context-parallel axis: its size, and what crosses from shard to shard. The default has size 1.

    Args:
        axis: this rank's view of the axis.
        exchange: how states reach the ranks after (`ParallelConfig.cp_exchange`).
    """

    def __init__(self, axis: Axis | None = None, *, exchange: ExchangeName = "auto") -> None:
        self.axis = Axis("cp") if axis is None else axis
        self.exchange = "all_gather" if exchange == "auto" else exchange

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.axis.size

    def shard(self, x: Tensor) -> Tensor:
        """This rank's tokens of a whole row: [B, T, ...] -> [B, T/cp, ...], a view."""
        assert x.shape[TOKENS] % self.size == 0, (x.shape, self.size)
        return local_slice(x, self.axis, dim=TOKENS)

    def positions(self, tokens: Tensor) -> Tensor:
        """[T/cp] numbers of this rank's tokens [B, T/cp, ...] in the whole row."""
        return torch.arange(tokens.shape[TOKENS], device=tokens.device) + self.tokens_before(tokens)

    def tokens_before(self, tokens: Tensor) -> int:
        """Tokens of the whole row before this rank's [B, T/cp, ...]."""
        return self.axis.rank * tokens.shape[TOKENS]

    def reach(self, tokens: Tensor, *, window: int) -> int:
        """How many tokens before this rank's [B, T/cp, ...] a window of so many tokens shows to the first of them."""
        return min(window - 1, self.tokens_before(tokens))

    def seen_documents(self, document_ids: Tensor, *, window: int) -> Tensor:
        """Of ids [B, T/cp] those [B, reach + T/cp] of all tokens that this rank's see through a window. Exchanges
        window - 1 ids a rank; not differentiable."""
        reach, num = self.reach(document_ids, window=window), min(window - 1, document_ids.shape[TOKENS])
        tails = all_gather(document_ids[:, document_ids.shape[TOKENS] - num :], self.axis, dim=TOKENS)
        before = tails.narrow(TOKENS, self.axis.rank * num - reach, reach)
        return torch.cat([before, document_ids], dim=TOKENS)

    def row(self, document_ids: Tensor | None, valid: Tensor | None) -> FullSequenceInfo:
        """Gathers what is known of each rank's tokens [B, T/cp], for mixers that need it of all, once a batch."""
        ids, bits = (None if x is None else self._whole(x) for x in (document_ids, valid))
        return FullSequenceInfo(ids, bits)

    def _whole(self, x: Tensor) -> Tensor:
        # Not every backend sends bools.
        return all_gather(x.to(torch.uint8) if x.dtype == torch.bool else x, self.axis, dim=TOKENS).to(x.dtype)

    def borders(self, tokens: Tensor, document_ids: Tensor | None) -> ShardDocuments | None:
        """Exchanges the documents at the ends of the shards, once a batch; None on an axis of size 1.

        Args:
            tokens: [B, T/cp].
            document_ids: [B, T/cp], non-decreasing over the whole row; None when each row is one document.
        """
        if self.size == 1:
            return None
        if document_ids is None:
            ends = tokens.new_zeros(self.size, 2, tokens.shape[0])
        else:
            own = torch.stack([document_ids[:, 0], document_ids[:, -1]])
            ends = all_gather(own, self.axis, dim=0).unflatten(0, (self.size, 2))  # [cp, 2, B]
        return self._borders(ends)

    def borders_of(self, ids: Tensor) -> ShardDocuments:
        """The borders of any runs of tokens, whose ids [B, T] every rank has of whole rows; sends nothing."""
        shards = ids.unflatten(TOKENS, (self.size, -1))  # [B, cp, T/cp]
        return self._borders(torch.stack([shards[..., 0].T, shards[..., -1].T], dim=1))

    def _borders(self, ends: Tensor) -> ShardDocuments:
        """Borders of the ids at the first and the last token of each rank, [cp, 2, B]."""
        earlier = torch.ones(self.size, self.size, dtype=torch.bool, device=ends.device).tril(-1)
        same = ends[:, None, 0] == ends[None, :, 1]  # [cp, cp, B]
        return ShardDocuments(same & earlier[..., None], ends[self.axis.rank, 0] == ends[self.axis.rank, 1])

    def sequence_shard(self, documents: ShardDocuments | None) -> SequenceShard | None:
        """The `shard` argument of a scan: this rank's shard of every sequence; None on an axis of size 1."""
        return None if documents is None else SequenceShard(self, documents)

    def fold(self, state: Tensor, log_decay: Tensor, borders: ShardDocuments) -> Tensor:
        """The state that enters this rank's tokens [B, H, K, V], of the document of the first of them, with gradients;
        arguments as `SequenceShard.fold` has them."""
        return SequenceShard(self, borders).fold(state, log_decay)

    def entering(self, state: Tensor, log_decay: Tensor, borders: ShardDocuments) -> Tensor:
        """As `ops.split.Ranks` has it: S -> S_in, one exchange."""
        return self._received(state, log_decay, borders, step=1)

    def leaving_gradient(self, gradient: Tensor, log_decay: Tensor, borders: ShardDocuments) -> Tensor:
        """As `ops.split.Ranks` has it: dS_in -> dS, one exchange."""
        return self._received(gradient, log_decay, borders, step=-1)

    def _received(self, x: Tensor, log_decay: Tensor, borders: ShardDocuments, *, step: Direction) -> Tensor:
        if self.exchange == "all_gather":
            return all_gather_states(x, log_decay, borders, axis=self.axis, step=step)
        num_blocks = 1 if self.exchange == "ring" else self.size
        return ring_states(x, log_decay, borders, axis=self.axis, step=step, num_blocks=num_blocks)

    def halo(self, x: Tensor, borders: ShardDocuments, document_ids: Tensor | None, *, width: int) -> Tensor:
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

    def around(self, first: Tensor, last: Tensor, borders: ShardDocuments) -> tuple[Tensor, Tensor]:
        """The sums, over the ranks before and over those after, of what belongs to the run of tokens that this rank's
        first token continues, and that its last token starts. Both [B, H, K, V], zero where there is nothing; an
        all-gather of twice as much a rank forward, a reduce-scatter backward.

        Args:
            first, last: [B, H, K, V], what this rank's tokens add to the runs of the first and of the last of them.
            borders: of the runs.
        """
        gathered = gather_from_axis(torch.stack([first, last])[None], self.axis, dim=0)  # [cp, 2, B, H, K, V]
        rank, others = self.axis.rank, borders.continues[..., None, None, None]
        return gathered[:, 1].where(others[rank], 0.0).sum(0), gathered[:, 0].where(others[:, rank], 0.0).sum(0)

    def total(self, x: Tensor) -> Tensor:
        """Sums what every rank's tokens add, for use on every rank's tokens: all-reduce forward and backward."""
        return copy_to_axis(reduce_from_axis(x, self.axis), self.axis)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From some tokens of all heads to all tokens of some heads: [B, T/cp, H, K] each -> [B, T, H/cp, K], cp a
        divisor of each H. One all-to-all each way."""
        if self.size == 1:
            return tensors
        parts = torch.cat([x.unflatten(2, (self.size, -1)) for x in tensors], dim=3)  # [B, T/cp, cp, sum of H/cp, K]
        whole = all_to_all_over_axis(parts, self.axis, split=2, join=TOKENS).squeeze(2)
        return whole.split([x.shape[2] // self.size for x in tensors], dim=2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back: [B, T, H/cp, K] -> [B, T/cp, H, K]. One all-to-all each way."""
        return all_to_all_over_axis(x, self.axis, split=TOKENS, join=2)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """[B, T/cp, ...] -> [B, T, ...] of every rank: all-gather forward, reduce-scatter backward."""
        return gather_from_axis(x, self.axis, dim=TOKENS)

    def pick_tokens(self, x: Tensor, index: Tensor, tp: TensorParallel) -> Tensor:
        """Some tokens of the residual stream, zero where another rank has them: [B, T/cp or T/cp/tp, D] at the token
        numbers index [B, P] of the whole row -> [B, P, D]. Sum them over the ranks."""
        if self.size == 1:
            return tp.pick_tokens(x, index)
        length = x.shape[TOKENS] * (tp.size if tp.sequence_parallel else 1)
        index = index - self.axis.rank * length
        absent = (index < 0) | (index >= length)
        return tp.pick_tokens(x, index.masked_fill(absent, 0)).masked_fill(absent[..., None], 0.0)

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        """An equal share of the rows that the ranks hold in parts: [B, P, D] -> the sum's [B, P/cp, D]. Reduce-scatter
        forward, all-gather backward."""
        return reduce_scatter_to_axis(x, self.axis, dim=TOKENS)
