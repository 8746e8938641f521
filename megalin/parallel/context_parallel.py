"""The context-parallel axis: each rank holds T/cp neighbouring tokens, and the state that enters them is computed from
the states of the ranks before:

    S_in(0) = 0,    S_in(r + 1) = exp(T_r) S_in(r) + S_r

with S_r the final state of rank r's tokens from a zero initial state, and T_r the sum of their log decays. States are
exchanged once each way, and their size does not depend on the number of tokens. Documents: S_r is of the last document
of the shard, and enters the ranks whose first token continues that document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.transition import DiagonalDecay, Direction, ShardDocuments, Transition
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
from megalin.parallel.config import ExchangeName
from megalin.parallel.state_passing import all_gather_states, ring_states
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel


class FullSequenceInfo(NamedTuple):
    """Documents and padding of full sequences, the other ranks' tokens included."""

    document_ids: Tensor | None
    """[B, T], non-decreasing; None where each sequence is one document."""
    valid: Tensor | None
    """[B, T] bool, False where a token is padding; None where all tokens count."""


class ContextParallel:
    """The context-parallel axis: its size, and the communication between shards. The default has size 1.

    Args:
        axis: this rank's view of the axis.
        exchange: method of the state exchange (`ParallelConfig.cp_exchange`).
    """

    def __init__(self, axis: Axis | None = None, *, exchange: ExchangeName = "auto") -> None:
        self.axis = Axis("cp") if axis is None else axis
        self.exchange = "all_gather" if exchange == "auto" else exchange

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.axis.size

    def shard(self, x: Tensor) -> Tensor:
        """This rank's shard of full sequences: [B, T, ...] -> [B, T/cp, ...], a view."""
        assert x.shape[TOKENS] % self.size == 0, (x.shape, self.size)
        return local_slice(x, self.axis, dim=TOKENS)

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions [T/cp] of this rank's tokens [B, T/cp, ...] in the full sequence."""
        return torch.arange(tokens.shape[TOKENS], device=tokens.device) + self.tokens_before(tokens)

    def tokens_before(self, tokens: Tensor) -> int:
        """Number of tokens of the full sequence before this rank's [B, T/cp, ...]."""
        return self.axis.rank * tokens.shape[TOKENS]

    def window_reach(self, tokens: Tensor, *, window: int) -> int:
        """Number of tokens before this rank's [B, T/cp, ...] that its first token attends to through a window."""
        return min(window - 1, self.tokens_before(tokens))

    def visible_document_ids(self, document_ids: Tensor, *, window: int) -> Tensor:
        """Document ids [B, window_reach + T/cp] of all tokens that this rank's attend to through a window, from its own
        [B, T/cp]. An all-gather of window - 1 ids a rank; not differentiable."""
        reach, num = self.window_reach(document_ids, window=window), min(window - 1, document_ids.shape[TOKENS])
        tails = all_gather(document_ids[:, document_ids.shape[TOKENS] - num :], self.axis, dim=TOKENS)
        before = tails.narrow(TOKENS, self.axis.rank * num - reach, reach)
        return torch.cat([before, document_ids], dim=TOKENS)

    def full_sequence_info(self, document_ids: Tensor | None, valid: Tensor | None) -> FullSequenceInfo:
        """All-gathers documents and padding of the ranks' tokens [B, T/cp], for mixers that read all; once a batch."""
        ids, bits = (None if x is None else self._gather_full(x) for x in (document_ids, valid))
        return FullSequenceInfo(ids, bits)

    def _gather_full(self, x: Tensor) -> Tensor:
        # Not every backend sends bools.
        return all_gather(x.to(torch.uint8) if x.dtype == torch.bool else x, self.axis, dim=TOKENS).to(x.dtype)

    def shard_documents(self, tokens: Tensor, document_ids: Tensor | None) -> ShardDocuments | None:
        """All-gathers the documents at the ends of the shards, once a batch; None on an axis of size 1.

        Args:
            tokens: [B, T/cp].
            document_ids: [B, T/cp], non-decreasing over the full sequence; None when each sequence is one document.
        """
        if self.size == 1:
            return None
        if document_ids is None:
            ends = tokens.new_zeros(self.size, 2, tokens.shape[0])
        else:
            own = torch.stack([document_ids[:, 0], document_ids[:, -1]])
            ends = all_gather(own, self.axis, dim=0).unflatten(0, (self.size, 2))  # [cp, 2, B]
        return self._shard_documents(ends)

    def shard_documents_of(self, ids: Tensor) -> ShardDocuments:
        """`shard_documents` of any runs of tokens, given by their ids [B, T] on every rank; sends nothing."""
        shards = ids.unflatten(TOKENS, (self.size, -1))  # [B, cp, T/cp]
        return self._shard_documents(torch.stack([shards[..., 0].T, shards[..., -1].T], dim=1))

    def _shard_documents(self, ends: Tensor) -> ShardDocuments:
        """From the ids at the first and the last token of each rank, [cp, 2, B]."""
        earlier = torch.ones(self.size, self.size, dtype=torch.bool, device=ends.device).tril(-1)
        same = ends[:, None, 0] == ends[None, :, 1]  # [cp, cp, B]
        return ShardDocuments(same & earlier[..., None], ends[self.axis.rank, 0] == ends[self.axis.rank, 1])

    def sequence_shard(self, documents: ShardDocuments | None) -> SequenceShard | None:
        """The `shard` argument of a scan: this rank's shard of every sequence; None on an axis of size 1."""
        return None if documents is None else SequenceShard(self, documents)

    def entering(self, state: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        """`StateExchange.entering`: S -> S_in, one state exchange."""
        return self._exchange_states(state, transition, documents, step=1)

    def leaving_gradient(self, gradient: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        """`StateExchange.leaving_gradient`: dS_in -> dS, one state exchange."""
        return self._exchange_states(gradient, transition, documents, step=-1)

    def _exchange_states(
        self, x: Tensor, transition: Transition, documents: ShardDocuments, *, step: Direction
    ) -> Tensor:
        states = all_gather_states if self.exchange == "all_gather" else ring_states
        return states(x, transition, documents, axis=self.axis, step=step)

    def halo(self, x: Tensor, documents: ShardDocuments, document_ids: Tensor | None, *, width: int) -> Tensor:
        """The `width` inputs before this rank's tokens: x [B, T/cp, D] -> [B, width, D], zero before the sequence and
        in documents other than the first token's. An all-gather of `width` tokens a rank forward, a reduce-scatter
        backward."""
        num = min(width, x.shape[TOKENS])
        tail = x[:, -num:]
        if document_ids is not None:
            tail = tail.masked_fill((document_ids[:, -num:] != document_ids[:, -1:])[..., None], 0.0)
        tails = gather_from_axis(tail, self.axis, dim=TOKENS)  # [B, cp * num, D]
        continues = documents.continues[self.axis.rank].T.repeat_interleave(num, dim=1)  # [B, cp * num]
        padded = functional.pad(tails.masked_fill(~continues[..., None], 0.0), (0, 0, width, 0))
        return padded.narrow(TOKENS, self.axis.rank * num, width)

    def neighbouring_run_sums(self, first: Tensor, last: Tensor, documents: ShardDocuments) -> tuple[Tensor, Tensor]:
        """Sums over the other ranks of the runs of tokens that cross this rank's ends: of its first token's run over
        the ranks before, and of its last token's run over the ranks after. Both [B, H, K, V], zero without such a run;
        an all-gather of twice as much a rank forward, a reduce-scatter backward.

        Args:
            first, last: [B, H, K, V], the sums of this rank's tokens in the runs of its first and its last token.
            documents: of the runs (`shard_documents_of`).
        """
        gathered = gather_from_axis(torch.stack([first, last])[None], self.axis, dim=0)  # [cp, 2, B, H, K, V]
        rank, others = self.axis.rank, documents.continues[..., None, None, None]
        return gathered[:, 1].where(others[rank], 0.0).sum(0), gathered[:, 0].where(others[:, rank], 0.0).sum(0)

    def all_reduce_both(self, x: Tensor) -> Tensor:
        """Sums partial results whose sum every rank uses on its own tokens: all-reduce forward, all-reduce backward."""
        return copy_to_axis(reduce_from_axis(x, self.axis), self.axis)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Reshards from tokens to heads: [B, T/cp, H, K] each -> [B, T, H/cp, K], cp a divisor of each H. One
        all-to-all each way."""
        if self.size == 1:
            return tensors
        chunks = torch.cat([x.unflatten(2, (self.size, -1)) for x in tensors], dim=3)  # [B, T/cp, cp, sum of H/cp, K]
        gathered = all_to_all_over_axis(chunks, self.axis, split_dim=2, concat_dim=TOKENS).squeeze(2)
        return gathered.split([x.shape[2] // self.size for x in tensors], dim=2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Inverse of `to_heads`: [B, T, H/cp, K] -> [B, T/cp, H, K]. One all-to-all each way."""
        return all_to_all_over_axis(x, self.axis, split_dim=TOKENS, concat_dim=2)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """[B, T/cp, ...] -> all ranks' tokens [B, T, ...]: all-gather forward, reduce-scatter backward."""
        return gather_from_axis(x, self.axis, dim=TOKENS)

    def pick_tokens(self, x: Tensor, index: Tensor, tp: TensorParallel) -> Tensor:
        """Selected tokens of the residual stream, zero where another rank holds them: [B, T/cp or T/cp/tp, D] at the
        positions index [B, P] of the full sequence -> [B, P, D]. Sum them over the ranks."""
        if self.size == 1:
            return tp.pick_tokens(x, index)
        length = x.shape[TOKENS] * (tp.size if tp.sequence_parallel else 1)
        index = index - self.axis.rank * length
        absent = (index < 0) | (index >= length)
        return tp.pick_tokens(x, index.masked_fill(absent, 0)).masked_fill(absent[..., None], 0.0)

    def reduce_scatter_tokens(self, x: Tensor) -> Tensor:
        """Sums partial results over the ranks; each keeps a shard: [B, P, D] -> [B, P/cp, D]. Reduce-scatter
        forward, all-gather backward."""
        return reduce_scatter_to_axis(x, self.axis, dim=TOKENS)


class ReversedExchange:
    """`StateExchange` of a scan from the last token to the first: states go to earlier ranks, gradients to later ones.

        S_in(j) = sum over r > j of W_rj^T S_r,    W as in `ops.scans.context_parallel`

    This is the adjoint of the exchange in the order of the tokens, with the same decays: a rank's total decay is the
    same in both orders. It holds for diagonal transitions, which are their own transposes.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp

    def entering(self, state: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        """S, at a rank's first token, -> S_in, after its last one; one state exchange."""
        assert isinstance(transition, DiagonalDecay), type(transition)
        return self._cp.leaving_gradient(state, transition, documents)

    def leaving_gradient(self, gradient: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        """dS_in -> dS, one state exchange."""
        return self._cp.entering(gradient, transition, documents)
