"""The file of a sweep: a config, axes of overrides, and the rule that ends a run early."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import pydantic

from megalin.config import Config, parse, read_toml
from megalin.errors import ConfigError
from megalin.train.config import load_run_config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_PLACEHOLDER = re.compile(r"{([^{}]*)}")


class StopConfig(Config):
    """Rule that ends a run before its last step, checked at every evaluation of the goal."""

    reached: float | None = None
    """Value of the goal at which a run ends."""
    patience: int | None = pydantic.Field(default=None, ge=1)
    """Evaluations in a row without a gain after which a run ends; left out: none ends for that reason."""
    min_gain: float = pydantic.Field(default=0.001, gt=0.0)
    """Increase of the goal over its best value so far that is a gain."""
    loss: str | None = None
    """Metric, lower is better, whose decrease by `min_loss_gain` of its best value is a gain as well: while a task is
    learned the loss often falls long before the accuracy rises."""
    min_loss_gain: float = pydantic.Field(default=0.005, gt=0.0)
    """Relative decrease of `loss` that is a gain."""


class SweepConfig(Config):
    """A sweep: one run for each combination of the axes' values."""

    config: str
    """Config of the runs, relative to the sweep's file."""
    overrides: list[str] = pydantic.Field(default=[])
    """Overrides of every run, as on the command line of `train`."""
    axes: dict[str, dict[str, list[str]]]
    """Values of each axis by name, with their overrides. The first axis varies slowest: where the time limit ends the
    sweep, its last values are missing."""
    goal: str
    """Field of metrics.jsonl, higher is better, by which runs are compared. {AXIS} stands for a run's value of an axis,
    as in "tasks/{task}/accuracy"; in `columns` and `stop.loss` too."""
    best_over: list[str] = pydantic.Field(default=[])
    """Axes over which the table shows the best value only, such as the learning rate."""
    columns: dict[str, str] = pydantic.Field(default={})
    """Fields of metrics.jsonl in the table by their headings, at the step of the goal's best value; without any, the
    goal."""
    stop: StopConfig = StopConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        problems = [f"axes.{name} has no values; add some or remove it" for name, axis in self.axes.items() if not axis]
        for name in [*self.axes, *(value for axis in self.axes.values() for value in axis)]:
            if not _NAME.fullmatch(name):
                problems.append(f"axes: {name!r} is part of a folder's name; use letters, digits, '_', '.' and '+'")
        for name in self.best_over:
            if name not in self.axes:
                problems.append(f"best_over: {name!r} is no axis; use some of {', '.join(self.axes)}")
        for field in (self.goal, *self.columns.values(), *([] if self.stop.loss is None else [self.stop.loss])):
            for name in _PLACEHOLDER.findall(field):
                if name not in self.axes:
                    problems.append(f"{field!r}: {name!r} is no axis; use some of {', '.join(self.axes)}")
        if not self.axes:
            problems.append("axes is empty; add a table such as [axes.rate] with the overrides of each value")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def metric_name(field: str, values: Mapping[str, str]) -> str:
    """A field of metrics.jsonl with the run's values of the axes in place of {AXIS}."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], field)


class Cell(NamedTuple):
    """One run of a sweep."""

    values: dict[str, str]
    """Its value of each axis."""
    overrides: list[str]
    """Overrides of its config."""

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return "-".join(self.values.values())


class Sweep(NamedTuple):
    """A sweep read from its file."""

    path: Path
    config: SweepConfig

    @property
    def run_config(self) -> Path:
        """The config of the runs."""
        return self.path.parent / self.config.config

    def cells(self) -> Iterator[Cell]:
        """Every run, the last axis fastest."""
        axes = self.config.axes
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            overrides = [each for axis, value in chosen.items() for each in axes[axis][value]]
            yield Cell(chosen, [*self.config.overrides, *overrides])


def read_sweep(path: Path) -> Sweep:
    """Reads the sweep's file and the config of each of its runs.

    Raises:
        ConfigError: naming the problems of the file, or of the first run whose config is invalid.
    """
    sweep = Sweep(path, parse(SweepConfig, read_toml(path), str(path)))
    for cell in sweep.cells():
        try:
            load_run_config(sweep.run_config, cell.overrides)
        except ConfigError as error:
            raise ConfigError(f"run {cell.name} of {path}: {error}") from None
    return sweep
