"""State exchange of scans whose sequences are sharded over ranks: the state entering a shard, and its adjoint.

    S_in(r) = sum over j < r of W_rj S_j,    dS_j = sum over r > j of W_rj^T dS_in(r),
    W_rj = A_{r-1} ... A_{j+1} where r continues j's document, else 0

with S_j the final state of rank j's shard computed from a zero initial state, and A_j its transition. dS_j is the
gradient of the state that leaves rank j. Given S_in and dS_j, a shard is a sequence of its own, with the initial state
S_in and the gradient dS_j of its final state (docs/adr/0016).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalin.ops.scans.transition import ShardDocuments, Transition


class StateExchange(Protocol):
    """State exchange between the ranks of a context-parallel group, by an all-gather or a ring; no autograd."""

    def entering(self, state: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        """Forward: S [B, H, K, V] -> S_in [B, H, K, V]; zero on the first rank and where a document starts."""
        ...

    def leaving_gradient(self, gradient: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        """Backward: dS_in [B, H, K, V] -> dS [B, H, K, V]; zero on the last rank and where a document ends."""
        ...


class SequenceShard(NamedTuple):
    """This rank's shard of every sequence under context parallelism."""

    exchange: StateExchange
    documents: ShardDocuments


class SingleProcessExchange:
    """`StateExchange` in one process, for tests: sample r of the batch is rank r's shard of one sequence."""

    def sequence_shard(self, document_ids: Tensor) -> SequenceShard:
        """The shards of one sequence with document_ids [cp, T]."""
        first, last = document_ids[:, 0], document_ids[:, -1]
        return SequenceShard(self, ShardDocuments((first[:, None] == last).tril(-1)[..., None], first == last))

    def entering(self, state: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        received = torch.zeros_like(state)
        for rank, next_rank in pairwise(range(len(state))):
            passed = transition.apply(received)[rank] * documents.through[rank]
            received[next_rank] = (state[rank] + passed) * documents.continues[next_rank, rank]
        return received

    def leaving_gradient(self, gradient: Tensor, transition: Transition, documents: ShardDocuments) -> Tensor:
        received = torch.zeros_like(gradient)
        for next_rank, rank in pairwise(reversed(range(len(gradient)))):
            passed = transition.apply_adjoint(received)[next_rank] * documents.through[next_rank]
            received[rank] = (gradient[next_rank] + passed) * documents.continues[next_rank, rank]
        return received
