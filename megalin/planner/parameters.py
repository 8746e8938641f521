"""Parameter counts of a rank, gathered and sharded, from the real modules on meta."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from megalin.model.language_model import LanguageModel
from megalin.parallel.shard_dim import shard_dim


class Elements(NamedTuple):
    """Element counts of an FSDP unit, at tensor-parallel sizes."""

    whole: int
    """Elements while the unit is gathered."""
    shard: int
    """Elements of a rank's shard; of the largest shard if they do not divide."""


@dataclass(frozen=True)
class StageParameters:
    """FSDP units of a stage, or of the whole model."""

    blocks: list[Elements]
    """Per block, the parameters used in the compute dtype."""
    rest: Elements
    """Embedding, head, final norm and input layers: gathered for the whole step."""
    precise: Elements
    """Parameters used in fp32: gathered for the whole step."""
    buffer_bytes: int
    """Bytes of buffers."""
    table: int
    """Elements of the matrix that computes the logits; 0 where another stage has it."""

    @cached_property
    def shard(self) -> int:
        """Elements of the shards of all units."""
        return self.first_shards[-1] + self.rest.shard + self.precise.shard

    @cached_property
    def whole(self) -> int:
        """Gathered elements of all units."""
        return self.first_wholes[-1] + self.rest.whole + self.precise.whole

    @cached_property
    def first_shards(self) -> list[int]:
        """Elements of the shards of the first b blocks, by b."""
        return list(accumulate((unit.shard for unit in self.blocks), initial=0))

    @cached_property
    def first_wholes(self) -> list[int]:
        """Gathered elements of the first b blocks, by b."""
        return list(accumulate((unit.whole for unit in self.blocks), initial=0))

    @cached_property
    def largest_wholes(self) -> list[int]:
        """Gathered elements of the largest of the first b blocks, by b."""
        return list(accumulate((unit.whole for unit in self.blocks), max, initial=0))


def stage_parameters(stage: LanguageModel, shard: int) -> StageParameters:
    """Counts the units of `stage`, built at tensor-parallel sizes and sharded over `shard` ranks."""
    precise = {id(p): p for module in stage.full_precision_modules() for p in module.parameters()}
    in_blocks: dict[int, Tensor] = {}
    blocks = []
    for block in stage.block_list():
        own = {id(p): p for p in block.parameters() if id(p) not in precise}
        blocks.append(_elements(own.values(), shard))
        in_blocks |= own
    rest = [p for p in stage.parameters() if id(p) not in precise and id(p) not in in_blocks]
    table = stage.stage.is_last and (stage.head or stage.embedding).weight.numel()
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in stage.buffers())
    return StageParameters(blocks, _elements(rest, shard), _elements(precise.values(), shard), buffers, int(table))


def _elements(parameters: Iterable[Tensor], shard: int) -> Elements:
    whole = sharded = 0
    for parameter in parameters:
        shape = parameter.shape
        size = shape[shard_dim(tuple(shape), shard)]
        whole += parameter.numel()
        sharded += math.ceil(size / shard) * (parameter.numel() // size)
    return Elements(whole, sharded)


def merge_stages(stages: list[StageParameters]) -> StageParameters:
    """Combined parameters of a rank that runs all of `stages`."""
    return StageParameters(
        [block for stage in stages for block in stage.blocks],
        _sum(stage.rest for stage in stages),
        _sum(stage.precise for stage in stages),
        sum(stage.buffer_bytes for stage in stages),
        sum(stage.table for stage in stages),
    )


def _sum(units: Iterable[Elements]) -> Elements:
    together = list(units)
    return Elements(sum(unit.whole for unit in together), sum(unit.shard for unit in together))
