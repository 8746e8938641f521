"""What is planned, a model and its steps, and one way to lay it out over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megalin.model.config import ModelConfig
from megalin.parallel.mesh import ParallelConfig


class Workload(NamedTuple):
    """A model and the steps that train it, whatever the mesh."""

    model: ModelConfig
    length: int
    """Tokens a sample."""
    global_batch_size: int
    """Samples a step over all ranks."""
    dtype: torch.dtype
    """Compute dtype."""
    compiled: bool
    """Whether blocks are compiled."""


class Layout(NamedTuple):
    """How ranks share a workload."""

    parallel: ParallelConfig
    dp: int
    """Groups of ranks that read different samples."""
    micro_batch_size: int
    """Samples a rank runs at a time."""
    num_micro_batches: int
    """Micro-batches a step."""
    recompute: bool
    """Whether the backward forms activations again."""

    @property
    def shard(self) -> int:
        """Ranks over which weights, gradients and optimizer state are sharded."""
        return self.parallel.shard_size(self.dp * self.parallel.cp)

    @property
    def zero(self) -> int:
        """The ZeRO stage that runs, as `Mesh.zero`."""
        if self.shard == 1:
            return 0
        default = 3 if self.parallel.pp == 1 else 1
        return default if self.parallel.zero is None else self.parallel.zero

    def in_flight(self, rank: int) -> int:
        """Forwards of single stages whose backward is still to come, at most, on a rank of the pipeline."""
        parallel = self.parallel
        if parallel.pp == 1:
            return 1
        turns = parallel.pp - rank
        if parallel.pp_stages > 1:
            turns = 2 * (parallel.pp - rank - 1) + (parallel.pp_stages - 1) * parallel.pp + 1
        return min(turns, self.num_micro_batches * parallel.pp_stages)

    def name(self) -> str:
        """For people: tp 2, dp 4 (ZeRO 3), ..."""
        parallel = self.parallel
        axes = [f"{axis} {size}" for axis, size in (("tp", parallel.tp), ("cp", parallel.cp), ("pp", parallel.pp))]
        axes = [axis for axis in axes if not axis.endswith(" 1")]
        batch = f"{self.num_micro_batches} x {self.micro_batch_size}"
        tail = ", recompute" if self.recompute else ""
        return ", ".join([*axes, f"dp {self.dp}", f"ZeRO {self.zero}", f"micro-batches {batch}"]) + tail
