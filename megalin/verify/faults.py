"""Named faults that the self-test plants, each a mistake that tensor-parallel code really makes.

A fault is a subclass that overrides one method of the mesh or of the tensor-parallel axis, or a change of the filled
weights: the code under test runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalin.parallel.linear import ColumnParallelLinear
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import TOKENS, TensorParallel, assign, full_tensor


class _SkippedAdjoint(TensorParallel):
    """Entering the sharded region forgets to sum the ranks' gradients."""

    def enter(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return x
        whole = super().enter(x.detach())
        mine = self.local_slice(whole, dim=TOKENS)
        return torch.cat(
            [
                x if rank == self.axis.rank else part
                for rank, part in enumerate(whole.split(mine.shape[TOKENS], TOKENS))
            ],
            dim=TOKENS,
        )


class _NormOfOneShard(TensorParallel):
    """The full-width norm uses this rank's heads only, scaled as if all were alike."""

    def reduce_tokens(self, x: Tensor) -> Tensor:
        own = x * self.size
        return self.local_slice(own, dim=TOKENS) if self.sequence_parallel else own


class _DroppedPartialGradient(TensorParallel):
    """A replicated weight on sharded data keeps its partial gradient."""

    def partial_gradient(self, weight: Tensor) -> Tensor:
        return weight


class _LocalCount(Mesh):
    """The loss is divided by this rank's own number of labels."""

    def sum_over_data(self, value: Tensor) -> Tensor:
        return value


def _split_across_parts(model: nn.Module, mesh: Mesh) -> None:
    """Fused matrices are cut as one long matrix, across their parts."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.parts > 1:
            pieces = full_tensor(module.weight.detach()).flatten(0, 1).chunk(mesh.tp.size)  # [parts * out / tp, in]
            assign(module.weight, torch.cat([piece.unflatten(0, (module.parts, -1)) for piece in pieces], dim=1))


class Fault(NamedTuple):
    """A mistake, and how it is planted."""

    name: str
    tensor_parallel: type[TensorParallel] = TensorParallel
    mesh: type[Mesh] = Mesh
    after_fill: Callable[[nn.Module, Mesh], None] | None = None
    needs_low_rank: bool = False
    """Only visible with a replicated weight, or a norm without a mean, on sharded data, of which softmax attention has
    neither: the case gets a block that has both."""
    decoder_only: bool = False
    """In a code path that encoders do not have."""


FAULTS = (
    Fault("skipped_adjoint", tensor_parallel=_SkippedAdjoint),
    Fault("norm_of_one_shard", tensor_parallel=_NormOfOneShard, needs_low_rank=True, decoder_only=True),
    Fault("dropped_partial_gradient", tensor_parallel=_DroppedPartialGradient, needs_low_rank=True, decoder_only=True),
    Fault("local_count", mesh=_LocalCount),
    Fault("wrong_part_split", after_fill=_split_across_parts, decoder_only=True),
)
