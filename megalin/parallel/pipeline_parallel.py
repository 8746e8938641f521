"""The pipeline axis: stages of layers on neighbouring ranks, and the parameters that they share.

Stage s runs on rank s % pp of the axis, so that with several stages a rank (interleaved) the model passes each rank
several times. Only activations and their gradients are sent between stages; every rank reads the same samples. A
parameter that several stages hold (a tied table, bounds of all layers) is equal on them by construction: its gradients
are summed over its holders after the last micro-batch, it counts once in the norm, and is saved once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalin.parallel.collectives import Axis, all_reduce
from megalin.parallel.heartbeats import Heartbeat, current
from megalin.parallel.process_group import open_groups
from megalin.parallel.tensor_parallel import local

LOSS_DTYPE = torch.float64
"""Dtype of the loss sum that the last stage returns."""


class PipelineParallel:
    """The pipeline axis: its size, the stages of this rank, and sums over stages. The default has size 1.

    Args:
        axis: this rank's view of the axis.
        group: the process group of the axis; none at size 1.
        stages_per_rank: stages that each rank runs.
        launches: records the transfers through symmetric memory.
    """

    def __init__(
        self,
        axis: Axis | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        stages_per_rank: int = 1,
        launches: Heartbeat | None = None,
    ) -> None:
        self.axis = Axis("pp") if axis is None else axis
        self.launches = current() if launches is None else launches
        self.group = group
        self.num_stages = self.size * stages_per_rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.axis.size

    def own_stages(self) -> list[int]:
        """The stages of this rank, in the order of the forward."""
        return list(range(self.axis.rank, self.num_stages, self.size))

    def own(self, plan: Sequence[range]) -> list[range]:
        """The ranges of this rank's stages in a plan for all stages."""
        return [plan[stage] for stage in self.own_stages()]

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a tensor over the axis, on every rank."""
        return all_reduce(value, self.axis)

    def axis_of_holders(self, stages: Sequence[int]) -> Axis:
        """The axis of the ranks that run any of `stages`; of size 1 on other ranks. A collective of all ranks of the
        run where these ranks are neither one nor all of the pipeline axis."""
        ranks = sorted({stage % self.size for stage in stages})
        if len(ranks) == 1:
            return Axis("copies")
        if len(ranks) == self.size:
            return self.axis
        stride = dist.get_world_size() // self.size  # pp is the outermost dimension of the mesh
        group = open_groups("copies", [[column + rank * stride for rank in ranks] for column in range(stride)])
        if group is None:
            return Axis("copies")
        return Axis("copies", group.size(), group.rank(), group.group_name)

    @torch.no_grad()
    def sum_copies(self, copies: Sequence[nn.Parameter], holders: Axis) -> None:
        """Sums the gradients of a parameter's copies: over this rank's stages, then over its holders. This rank's first
        copy receives the sum; the gradients of its others become None."""
        gradients = [local(copy.grad) for copy in copies if copy.grad is not None]
        assert len(gradients) == len(copies), f"{len(gradients)} gradients of {len(copies)} copies"
        gradients[0].copy_(all_reduce(torch.stack(gradients).sum(0), holders))
        for copy in copies[1:]:
            copy.grad = None
