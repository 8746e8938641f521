"""A transition by a full matrix per head, as of a delta rule; its scan has no kernels yet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.ops.scans.transition import Direction, ShardDocuments


class MatrixTransition(NamedTuple):
    """S -> A S."""

    matrix: Tensor
    """A [B, H, K, K]."""

    @property
    def num_sent(self) -> int:
        return 1

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def apply(self, state: Tensor) -> Tensor:
        return self.matrix @ state

    def apply_adjoint(self, gradient: Tensor) -> Tensor:
        return self.matrix.mT @ gradient

    def gradients(self, entering: Tensor, d_leaving: Tensor, through: Tensor) -> tuple[Tensor, ...]:
        """dA = dS S_in^T."""
        return ((d_leaving @ entering.mT).masked_fill(~through[:, None, None, None], 0.0),)

    def fold(self, x: Tensor, documents: ShardDocuments, *, rank: int, step: Direction) -> Tensor:
        """One loop over all ranks; masks leave out those beyond this rank."""
        received, size = torch.zeros_like(x[0]), len(x)
        others = documents.continues[rank] if step == 1 else documents.continues[:, rank]  # [cp, B]
        for other in range(size) if step == 1 else reversed(range(size)):
            matrix = self.matrix[other] if step == 1 else self.matrix[other].mT
            between = other < rank if step == 1 else other > rank
            passed = x[other].where(others[other][:, None, None, None], 0.0) + matrix @ received
            received = passed.where(torch.tensor(between, device=x.device), received)
        return received
