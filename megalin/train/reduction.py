"""Limits of `train.reduction = "tree"`, of which a run is refused before its first collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megalin.errors import ConfigError
from megalin.parallel.tree_reduction import is_power_of_two

if TYPE_CHECKING:
    from megalin.train.config import RunConfig, TrainConfig

_TREE = 'train.reduction = "tree"'
_OTHERWISE = 'or train.reduction = "collective"'


def tree_problems(config: RunConfig) -> list[str]:
    """Settings that a tree over micro-batches does not support on any number of ranks."""
    train, parallel = config.train, config.parallel
    if train.reduction != "tree":
        return []
    problems = [
        f"{_TREE} with parallel.{name} = {size}, whose ranks add parts of one micro-batch; use {name} = 1, {_OTHERWISE}"
        for name, size in (("tp", parallel.tp), ("cp", parallel.cp), ("pp", parallel.pp))
        if size > 1
    ]
    if train.engine != "fsdp2":
        problems.append(
            f'{_TREE} with train.engine = "{train.engine}", which reduces gradients itself; use engine = "fsdp2", '
            f"{_OTHERWISE}"
        )
    if parallel.shard is not None:
        problems.append(
            f"{_TREE} with parallel.shard = {parallel.shard}, a division of the data axis that not every number of "
            f"ranks has; use parallel.zero = 0 or 1 without shard, {_OTHERWISE}"
        )
    elif parallel.zero not in (0, 1):
        value = "left out, which is stage 3," if parallel.zero is None else f"= {parallel.zero},"
        problems.append(
            f"{_TREE} with parallel.zero {value} but the gradient of a micro-batch is added whole; use zero = 0 or 1, "
            f"{_OTHERWISE}"
        )
    count, rest = divmod(train.global_batch_size, train.micro_batch_size)
    if not rest and not is_power_of_two(count):
        below = 1 << (count.bit_length() - 1)
        sizes = f"{below * train.micro_batch_size} or {2 * below * train.micro_batch_size}"
        problems.append(
            f"{_TREE} with {count} micro-batches a step (train.global_batch_size = {train.global_batch_size} / "
            f"train.micro_batch_size = {train.micro_batch_size}), which is no power of two; use global_batch_size = "
            f"{sizes}, {_OTHERWISE}"
        )
    return problems


def check_tree_ranks(train: TrainConfig, world_size: int) -> None:
    """Raises ConfigError for a number of ranks that is no level of the tree."""
    if train.reduction != "tree":
        return
    count = train.global_batch_size // train.micro_batch_size
    if not is_power_of_two(world_size) or world_size > count:
        sizes = ", ".join(str(1 << level) for level in range(min(count, 2 * world_size).bit_length()))
        raise ConfigError(
            f"{_TREE} with {world_size} ranks, which do not divide the {count} micro-batches of a step in a tree; "
            f"start {sizes} ranks, {_OTHERWISE}"
        )


def check_tree_threads(device: torch.device) -> None:
    """Raises ConfigError for a CPU device on which this process computes in several threads: torch divides sums and
    matmuls by their number, and a rank of many has another number than a rank alone."""
    if device.type == "cpu" and (threads := torch.get_num_threads()) != 1:
        raise ConfigError(
            f"{_TREE} with {threads} CPU threads a rank, on whose number the bits of a matmul depend; set "
            f"OMP_NUM_THREADS=1, {_OTHERWISE}"
        )
