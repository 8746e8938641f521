"""Shapes of models of a given size: width and number of blocks, in the pattern of blocks of a base model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.ladder.config import ShapeConfig
from megalin.model.build import make_model
from megalin.model.config import ModelConfig
from megalin.model.counts import Counts, count

WIDEST_ASPECT = 4.0
"""Factor by which the aspect of a shape may differ from the asked one."""
_SIZE_MULTIPLE = 16
"""Intermediate sizes are multiples of it."""
_WITH_WIDTH = ("num_heads", "num_key_value_heads")


class Shape(NamedTuple):
    """A model and its counts."""

    model: ModelConfig
    counts: Counts

    @property
    def aspect(self) -> float:
        """Width over the number of blocks."""
        return self.model.hidden_size / self.model.num_layers


def find_shape(
    base: ModelConfig, target: float, config: ShapeConfig, *, length: int, by_flops: bool, name: str
) -> Shape:
    """The shape of a number of parameters without embeddings, or of FLOPs a token, within the tolerance.

    Of those within it, the one whose aspect is nearest to the asked one, as a ratio. Widths scale heads (of a constant
    width) and intermediate sizes; the number of blocks scales the repetitions of every entry of `layers` alike.

    Args:
        by_flops: whether `target` is FLOPs a token at `length` tokens, forward and backward.
        name: of the rung, for messages.

    Raises:
        ConfigError: no shape is near enough; names the nearest.
    """

    def size(shape: Shape) -> float:
        return shape.counts.flops_per_token if by_flops else shape.counts.non_embedding_parameters

    found = list(_candidates(base, target, config, length, size))
    fits = [shape for shape in found if abs(size(shape) / target - 1) <= config.tolerance]
    if fits:
        return min(fits, key=lambda shape: abs(math.log(shape.aspect / config.aspect)))
    what = "FLOPs a token" if by_flops else "parameters without embeddings"
    remedy = "change the size, raise shape.tolerance, or lower shape.width_multiple"
    if not found:
        raise ConfigError(
            f"{name}: no width that is a multiple of shape.width_multiple = {config.width_multiple} gives the heads of "
            f"the base model (width {base.hidden_size}) a whole number at an aspect near {config.aspect:g}; {remedy}"
        )
    best = min(found, key=lambda shape: abs(math.log(size(shape) / target)))
    raise ConfigError(
        f"{name}: no shape has {target:,.0f} {what} to {config.tolerance:.1%}; the nearest, width "
        f"{best.model.hidden_size} with {best.model.num_layers} blocks, has {size(best):,.0f}; {remedy}"
    )


def _candidates(
    base: ModelConfig, target: float, config: ShapeConfig, length: int, size: Callable[[Shape], float]
) -> Iterator[Shape]:
    """The two shapes around the target at each width, within a factor of the aspect."""
    common = math.gcd(*(block.repeat for block in base.layers))
    blocks = base.num_layers // common

    @cache
    def shape(width: int, units: int) -> Shape | None:
        model = _scaled(base, width, units, common)
        return None if model is None else Shape(model, count(make_model(model), length))

    for width in itertools.count(config.width_multiple, config.width_multiple):
        first, second = shape(width, 1), shape(width, 2)
        least = width / (config.aspect * WIDEST_ASPECT) / blocks
        if first is None or second is None:
            if width > 64 * max(base.hidden_size, config.width_multiple):
                return  # no multiple suits the heads
            continue
        each = size(second) - size(first)  # sizes are linear in the blocks
        if size(first) + (least - 1) * each > 2 * target:
            return
        near = 1 + (target - size(first)) / each
        most = width / config.aspect * WIDEST_ASPECT / blocks
        for units in {max(1, math.floor(near)), max(1, math.ceil(near))}:
            if least <= units <= most and (found := shape(width, units)) is not None:
                yield found


def _scaled(base: ModelConfig, width: int, units: int, common: int) -> ModelConfig | None:
    """The base at another width and number of blocks; None where a number of heads is not whole."""
    values = base.model_dump(mode="json")
    values["hidden_size"] = width
    if math.isclose(base.embedding_scale, math.sqrt(base.hidden_size), rel_tol=1e-6):
        values["embedding_scale"] = math.sqrt(width)
    for block in values["layers"]:
        block["repeat"] = block["repeat"] // common * units
        for sublayer in block["sublayers"]:
            for key in _WITH_WIDTH:
                if sublayer.get(key) is not None:
                    if sublayer[key] * width % base.hidden_size:
                        return None
                    sublayer[key] = sublayer[key] * width // base.hidden_size
            if (size := sublayer.get("intermediate_size")) is not None:
                scaled = size * width / base.hidden_size / _SIZE_MULTIPLE
                sublayer["intermediate_size"] = max(1, round(scaled)) * _SIZE_MULTIPLE
    return ModelConfig.model_validate(values)
