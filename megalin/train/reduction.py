"""Limits of `train.reduction = "tree"`, of which a run is refused before its first collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalin.errors import ConfigError

if TYPE_CHECKING:
    from megalin.train.config import RunConfig, TrainConfig

TREE = 'train.reduction = "tree"'
OTHERWISE = 'or train.reduction = "collective"'


def tree_problems(config: RunConfig) -> list[str]:
    """Settings that a tree over micro-batches does not support on any number of ranks."""
    train, parallel = config.train, config.parallel
    if train.reduction != "tree":
        return []
    problems = [
        f"{TREE} with parallel.{name} = {size}, whose ranks add parts of one micro-batch; use {name} = 1, {OTHERWISE}"
        for name, size in (("tp", parallel.tp), ("cp", parallel.cp), ("pp", parallel.pp))
        if size > 1
    ]
    if train.engine != "fsdp2":
        problems.append(
            f'{TREE} with train.engine = "{train.engine}", which reduces gradients itself; use engine = "fsdp2", '
            f"{OTHERWISE}"
        )
    if parallel.shard is not None:
        problems.append(
            f"{TREE} with parallel.shard = {parallel.shard}, a division of the data axis that not every number of "
            f"ranks has; use parallel.zero = 0 or 1 without shard, {OTHERWISE}"
        )
    elif parallel.zero not in (0, 1):
        value = "left out, which is stage 3," if parallel.zero is None else f"= {parallel.zero},"
        problems.append(
            f"{TREE} with parallel.zero {value} but the gradient of a micro-batch is added whole; use zero = 0 or 1, "
            f"{OTHERWISE}"
        )
    count, rest = divmod(train.global_batch_size, train.micro_batch_size)
    if not rest and count.bit_count() != 1:
        below = 1 << (count.bit_length() - 1)
        sizes = f"{below * train.micro_batch_size} or {2 * below * train.micro_batch_size}"
        problems.append(
            f"{TREE} with {count} micro-batches a step (train.global_batch_size = {train.global_batch_size} / "
            f"train.micro_batch_size = {train.micro_batch_size}), which is no power of two; use global_batch_size = "
            f"{sizes}, {OTHERWISE}"
        )
    return problems


def check_tree_ranks(train: TrainConfig, world_size: int) -> None:
    """Raises ConfigError for a number of ranks that is no level of the tree."""
    if train.reduction != "tree":
        return
    count = train.global_batch_size // train.micro_batch_size
    if world_size.bit_count() != 1 or world_size > count:
        sizes = ", ".join(str(1 << level) for level in range(min(count, 2 * world_size).bit_length()))
        raise ConfigError(
            f"{TREE} with {world_size} ranks, which do not divide the {count} micro-batches of a step in a tree; "
            f"start {sizes} ranks, {OTHERWISE}"
        )
