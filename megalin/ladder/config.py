"""The file of a ladder: mixers, sizes, token counts, and the rules of batch and learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import pydantic

from megalin.config import Config, parse, read_toml
from megalin.errors import ConfigError
from megalin.train.config_file import read_config, resolve

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
REFERENCE_PARAMETERS = 108e6
"""Parameters without embeddings at which the default rules have their printed values."""
_SET = (
    *("train.steps", "train.global_batch_size", "train.initial_weights", "train.branch_from"),
    *("train.stop_after_steps", "train.evaluate_batches", "optimizer.lr", "schedule.warmup_steps"),
    *("schedule.decay_steps", "checkpoint.keep_steps"),
)
"""Keys of a run that the ladder sets."""


class PowerRule(Config):
    """A value that follows a power of the parameters: value * (N / parameters) ** exponent."""

    value: float = pydantic.Field(gt=0, allow_inf_nan=False)
    """Value at `parameters`."""
    parameters: float = pydantic.Field(default=REFERENCE_PARAMETERS, gt=0, allow_inf_nan=False)
    """Parameters without embeddings at which the rule has its value."""
    exponent: float = pydantic.Field(allow_inf_nan=False)
    """Exponent of the parameters."""

    def at(self, parameters: float) -> float:
        """The value at a number of parameters."""
        return self.value * (parameters / self.parameters) ** self.exponent


class ShapeConfig(Config):
    """The shape of a model of a given size: its width, and blocks in the pattern of the base config."""

    aspect: float = pydantic.Field(default=64.0, gt=0, allow_inf_nan=False)
    """Width over the number of blocks. Of the shapes within `tolerance` of the size, the nearest to it is taken."""
    width_multiple: int = pydantic.Field(default=64, ge=1)
    """Widths are multiples of it. Heads keep their width, so that it should be a multiple of that."""
    tolerance: float = pydantic.Field(default=0.05, gt=0, lt=1)
    """Largest relative difference from the size."""


class RateSearchConfig(Config):
    """Short runs of each mixer's smallest size, whose best rate scales the rule of its other rungs."""

    factors: list[float] = pydantic.Field(default=[0.5, 1.0, 2.0], min_length=2)
    """Factors on the rate of the rule."""
    tokens: float = pydantic.Field(default=5.0, gt=0, allow_inf_nan=False)
    """Tokens a parameter of each of these runs."""


class LadderConfig(Config):
    """A ladder: for each mixer and size one trunk of a constant rate, and a decay from it for each token count."""

    config: str
    """Config of the runs, relative to the ladder's file: model, data, [optimizer] without rate, micro_batch_size as the
    most samples at a time. The ladder sets steps, batch, rate and schedule."""
    overrides: list[str] = pydantic.Field(default=[])
    """Overrides of every run, as on the command line of `train`."""
    mixers: dict[str, list[str]] = pydantic.Field(min_length=1)
    """Overrides of each mixer by its name, such as ["model.preset=tnl-70m"]."""
    sizes: list[float] = pydantic.Field(min_length=1)
    """Parameters without embeddings, rising."""
    match: Literal["parameters", "flops"] = "parameters"
    """Quantity that the mixers of a size share. parameters: those without embeddings. flops: the FLOPs a token of the
    first mixer, which alone is matched by its parameters."""
    tokens: list[float] = pydantic.Field(default=[5.0, 10.0, 20.0], min_length=1)
    """Training tokens over the parameters without embeddings, rising. The last is the trunk's own, the others are those
    of its branches."""
    decay: float = pydantic.Field(default=0.2, gt=0, lt=1)
    """Fraction of a run's tokens, those of its trunk included, over which the rate falls linearly at its end."""
    warmup: float = pydantic.Field(default=1.0, ge=0, allow_inf_nan=False)
    """Tokens a parameter over which the rate rises."""
    shape: ShapeConfig = ShapeConfig()
    batch: PowerRule = PowerRule(value=2048 * 160, exponent=2 / 3)
    """Tokens a step; the samples are rounded to 4, 5, 6 or 7 times a power of two (above 7). The default is that of
    OLMo-core's ladder."""
    rate: PowerRule = PowerRule(value=0.0047 / 2, exponent=-1 / 3)
    """Peak learning rate. The default is that of OLMo-core's ladder."""
    rate_search: RateSearchConfig | None = None
    """Search of each mixer's rate on the smallest size; left out: the rule's rate."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._list_problems("sizes", self.sizes), *self._list_problems("tokens", self.tokens)]
        if self.rate_search is not None:
            problems += self._list_problems("rate_search.factors", self.rate_search.factors)
        for name in self.mixers:
            if not _NAME.fullmatch(name):
                problems.append(f"mixers: {name!r} is part of a folder's name; use letters, digits, '_', '.' and '+'")
        shortest = [("tokens", min(self.tokens))]
        shortest += [] if self.rate_search is None else [("rate_search.tokens", self.rate_search.tokens)]
        for name, tokens in shortest:
            if self.warmup >= tokens * (1 - self.decay):
                problems.append(
                    f"warmup = {self.warmup:g} tokens a parameter reach into the decay of {name} = {tokens:g}, which "
                    f"starts at {tokens * (1 - self.decay):g}; lower warmup or decay, or train longer"
                )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @staticmethod
    def _list_problems(name: str, values: Sequence[float]) -> Iterator[str]:
        if any(not (math.isfinite(value) and value > 0) for value in values) or sorted(set(values)) != [*values]:
            yield f"{name} = {values}: give positive numbers that rise"


class Ladder(NamedTuple):
    """A ladder read from its file."""

    path: Path
    config: LadderConfig
    base: dict[str, Any]
    """The config of the runs as in its file."""

    @property
    def run_config(self) -> Path:
        """The config of the runs."""
        return self.path.parent / self.config.config

    def values(self, mixer: str) -> dict[str, Any]:
        """The resolved tables of a mixer's runs, without the keys that the ladder sets.

        Raises:
            ConfigError: overrides that do not apply, or a key that the ladder sets.
        """
        values = resolve(self.base, [*self.config.overrides, *self.config.mixers[mixer]])
        for key in _SET:
            table, name = key.split(".")
            if (given := _table(values, table).get(name)) is not None:
                raise ConfigError(
                    f"{self.path}: {key} = {given} in the config of {mixer}, but a ladder sets it for "
                    "each run; remove it"
                )
        schedule = _table(values, "schedule").get("type") or "wsd"
        if schedule != "wsd":
            raise ConfigError(
                f'{self.path}: schedule.type = "{schedule}" in the config of {mixer}, but branches need a '
                'constant rate before their decay; use "wsd", or remove it'
            )
        if _table(values, "data").get("order") == "megatron":
            raise ConfigError(
                f'{self.path}: data.order = "megatron" in the config of {mixer}, whose samples depend on the number of '
                "steps, so that a branch would read others than its trunk; remove it"
            )
        return values


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    table = values.get(name)
    return table if isinstance(table, dict) else {}


def parse_ladder(path: Path) -> Ladder:
    """Reads a ladder's file and the config of its runs.

    Raises:
        ConfigError: naming the problems of the files.
    """
    config = parse(LadderConfig, read_toml(path), str(path))
    return Ladder(path, config, read_config(path.parent / config.config))
