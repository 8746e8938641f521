"""Workload of a plan (a model and its training steps) and one layout of it over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megalin.model.config import ModelConfig
from megalin.parallel.config import ParallelConfig
from megalin.parallel.float8_layers import Float8Settings
from megalin.planner.hardware import GPUS_PER_HOST
from megalin.train.compute_dtypes import COMPUTE_DTYPES
from megalin.train.config import RunConfig
from megalin.train.float8 import float8_settings
from megalin.train.update_hooks import UpdateHook


class Workload(NamedTuple):
    """A model and its training steps, independent of the mesh."""

    model: ModelConfig
    length: int
    """Tokens per sample."""
    global_batch_size: int
    """Samples per step over all ranks."""
    dtype: torch.dtype
    """Compute dtype."""
    compiled: bool
    """True where blocks are compiled."""
    hooks: tuple[UpdateHook, ...] = ()
    """Hooks of the update, for their memory."""
    float8: Float8Settings | None = None
    """Choice of the FP8 matmuls; None without them."""

    def hook_bytes(self, elements: int) -> int:
        """Memory of the hooks on a rank with `elements` fp32 weights in its shards."""
        return sum(hook.memory_bytes(elements) for hook in self.hooks)


class ParallelLayout(NamedTuple):
    """Parallel layout of a workload."""

    parallel: ParallelConfig
    dp: int
    """Number of groups of ranks that read different samples."""
    micro_batch_size: int
    """Samples per micro-batch of a rank."""
    num_micro_batches: int
    """Micro-batches per step."""
    recompute: bool
    """True where the backward recomputes activations."""

    @property
    def shard(self) -> int:
        """Number of ranks over which weights, gradients and optimizer state are sharded."""
        return self.parallel.shard_size(self.dp * self.parallel.cp)

    def gradient_itemsize(self, itemsize: int) -> int:
        """Bytes of an element of the gradient at the update, in a compute dtype of `itemsize` bytes: fp32, except for
        one micro-batch a step on one data rank."""
        kept = self.num_micro_batches == 1 and self.dp * self.parallel.cp == 1 and self.parallel.pp == 1
        return itemsize if kept else 4

    @property
    def zero(self) -> int:
        """Effective ZeRO stage, as `Mesh.zero`."""
        return self.parallel.zero_stage(self.dp * self.parallel.cp)

    @property
    def copies_between_stages(self) -> bool:
        """True where symmetric memory carries activations between stages, as `auto` chooses on one host; the pipeline's
        axis spans all ranks."""
        parallel = self.parallel
        ranks = self.dp * parallel.tp * parallel.cp * parallel.pp
        return parallel.pp > 1 and parallel.pp_transfer != "p2p" and ranks <= GPUS_PER_HOST

    def in_flight(self, rank: int) -> int:
        """Largest number of stage forwards on a pipeline rank whose backward has not run yet."""
        parallel = self.parallel
        if parallel.pp == 1:
            return 1
        forwards = parallel.pp - rank
        if parallel.pp_stages_per_rank > 1:
            forwards = 2 * (parallel.pp - rank - 1) + (parallel.pp_stages_per_rank - 1) * parallel.pp + 1
        return min(forwards, self.num_micro_batches * parallel.pp_stages_per_rank)

    def name(self) -> str:
        """Readable name: tp 2, dp 4, ZeRO 3, micro-batches 1 x 8."""
        parallel = self.parallel
        axes = [f"{axis} {size}" for axis, size in (("tp", parallel.tp), ("cp", parallel.cp), ("pp", parallel.pp))]
        axes = [axis for axis in axes if not axis.endswith(" 1")]
        axes += ["sequence parallel"] if parallel.tp > 1 and parallel.sequence_parallel else []
        batch = f"{self.num_micro_batches} x {self.micro_batch_size}"
        tail = ", recompute" if self.recompute else ""
        return ", ".join([*axes, f"dp {self.dp}", f"ZeRO {self.zero}", f"micro-batches {batch}"]) + tail

    def overrides(self) -> list[str]:
        """Overrides of `megalin train` that give a config without `shard` this layout."""
        parallel = self.parallel
        values = {name: getattr(parallel, name) for name in ("tp", "cp", "pp")}
        values |= {"zero": self.zero} if self.dp * parallel.cp > 1 else {}
        return [
            *(f"parallel.{name}={value}" for name, value in values.items()),
            f"train.micro_batch_size={self.micro_batch_size}",
            f"train.recompute={str(self.recompute).lower()}",
            f"parallel.pp_schedule={parallel.pp_schedule}",
            f"parallel.pp_stages_per_rank={parallel.pp_stages_per_rank}",
            f"parallel.sequence_parallel={str(parallel.sequence_parallel).lower()}",
            f"parallel.tp_overlap={parallel.tp_overlap}",
        ]


def one_of_each(model: ModelConfig) -> ModelConfig:
    """Returns the model with one block of each entry of `layers`."""
    return model.model_copy(update={"layers": [block.model_copy(update={"repeat": 1}) for block in model.layers]})


def workload_of(config: RunConfig, model: ModelConfig, hooks: Sequence[UpdateHook] = ()) -> Workload:
    """Workload of a run with these update hooks; `model` is its model, a decoder."""
    train = config.train
    dtype, float8 = COMPUTE_DTYPES[train.dtype], float8_settings(train)
    length, batch = config.data.sequence_length, train.global_batch_size
    return Workload(model, length, batch, dtype, train.compile, tuple(hooks), float8)


def layout_of(config: RunConfig, world_size: int) -> ParallelLayout:
    """Layout of a run on `world_size` ranks, a multiple of the product of its axes."""
    train, parallel = config.train, config.parallel
    dp = world_size // (parallel.tp * parallel.cp * parallel.pp)
    micro_batches = train.global_batch_size // (dp * train.micro_batch_size)
    return ParallelLayout(parallel, dp, train.micro_batch_size, micro_batches, train.recompute)
