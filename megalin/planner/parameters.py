"""How many elements of the parameters a rank holds, whole and as its shard, from the real modules on meta."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from megalin.model.language_model import LanguageModel
from megalin.parallel.data_parallel import shard_dim


class Elements(NamedTuple):
    """Parameters of a unit of sharded data parallelism, of which tensor parallelism has cut off its share."""

    whole: int
    """Elements while the unit is gathered."""
    shard: int
    """Elements at rest; where they do not divide, those of the rank with most."""


class StageParameters(NamedTuple):
    """The units of a stage, which may be the whole model."""

    blocks: list[Elements]
    """Those of each block that compute in the compute dtype."""
    rest: Elements
    """Tables, the last norm, input layers: gathered for the whole step."""
    precise: Elements
    """What computes in fp32: gathered for the whole step."""
    buffer_bytes: int
    """Buffers."""
    table: int
    """Elements of the table whose product makes the logits; 0 where another stage has it."""

    @property
    def shard(self) -> int:
        """Elements at rest of all units."""
        return sum(unit.shard for unit in [*self.blocks, self.rest, self.precise])

    @property
    def whole(self) -> int:
        """Elements of all units where they are gathered."""
        return sum(unit.whole for unit in [*self.blocks, self.rest, self.precise])


def stage_parameters(stage: LanguageModel, shard: int) -> StageParameters:
    """The units of `stage`, whose parameters have their tensor-parallel sizes, sharded over `shard` ranks."""
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
    whole = part = 0
    for parameter in parameters:
        shape = parameter.shape
        size = shape[shard_dim(tuple(shape), shard)]
        whole += parameter.numel()
        part += math.ceil(size / shard) * (parameter.numel() // size)
    return Elements(whole, part)


def joined(stages: list[StageParameters]) -> StageParameters:
    """What a rank holds that runs all of `stages`."""
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
