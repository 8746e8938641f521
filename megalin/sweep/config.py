"""The file of a sweep: a config, axes of overrides, the rule that ends a run early, and the search over one axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Self

import pydantic

from megalin.config import Config, parse, read_toml, suggest
from megalin.evaluation.suites import OTHER_SUITES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_PLACEHOLDER = re.compile(r"{([^{}]*)}")
SEARCH = "search"
"""Stage of the short runs of a search."""


class StopConfig(Config):
    """Rule that ends a run before its last step, checked at every evaluation of the goal."""

    reached: float | None = None
    """Value of the goal at which a run ends."""
    patience: int | None = pydantic.Field(default=None, ge=1)
    """Evaluations in a row without a gain after which a run ends; left out: none ends for that reason."""
    min_gain: float = pydantic.Field(default=0.001, gt=0.0)
    """Improvement of the goal over its best value so far that is a gain."""
    loss: str | None = None
    """Metric, lower is better, whose decrease by `min_loss_gain` of its best value is a gain as well: while a task is
    learned the loss often falls long before the accuracy rises."""
    min_loss_gain: float = pydantic.Field(default=0.005, gt=0.0)
    """Relative decrease of `loss` that is a gain."""


class SearchConfig(Config):
    """Short runs that choose the value of one axis for each combination of the others, which then trains in full."""

    axis: str
    """The axis, such as the learning rate; each of its values gets a short run."""
    overrides: list[str]
    """Overrides of the short runs, after all others, such as fewer steps."""


class RepetitionConfig(Config):
    """Further runs of one combination, as with other seeds. Their spread says which differences mean something."""

    of: dict[str, str]
    """The run's value of every axis; not of the axis of a search, whose chosen value they share."""
    runs: dict[str, list[str]]
    """Overrides of each repetition by its name."""


class EvaluationsConfig(Config):
    """Suites of `megalin eval`, run on each run after its last step; not on the short runs of a search."""

    suites: list[str] = pydantic.Field(min_length=1)
    """Suites: loss, choices, positions, recall, state-tracking, needle, ruler."""
    tasks: list[str] = pydantic.Field(default=[])
    """Tasks of the suite choices; left out: those of `megalin eval`."""
    limit: int | None = pydantic.Field(default=None, ge=1)
    """Questions, examples or samples of each task; left out: all."""
    data: str | None = None
    """Folder of the choice tasks; left out: the run's evaluation.data."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        known = ("loss", "choices", *OTHER_SUITES)
        problems = [
            f"suites: {name!r} is no suite; {suggest(name, known)}" for name in self.suites if name not in known
        ]
        for key in ("tasks", "data"):
            if getattr(self, key) and "choices" not in self.suites:
                problems.append(f"{key} has no effect without the suite choices; add it to suites or remove {key}")
        if self.limit is not None and set(self.suites) <= {"loss"}:
            problems.append("limit has no effect on the suite loss; remove it or add another suite")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def arguments(self) -> list[str]:
        """Arguments of `megalin eval`."""
        tasks = ["--tasks", *self.tasks] if self.tasks else []
        limit = [] if self.limit is None else ["--limit", str(self.limit)]
        data = [] if self.data is None else ["--data", self.data]
        return ["--suite", ",".join(self.suites), *tasks, *limit, *data]


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
    """Field of metrics.jsonl by which runs are compared. {AXIS} stands for a run's value of an axis, as in
    "tasks/{task}/accuracy"; in `columns` and `stop.loss` too."""
    better: Literal["higher", "lower"] = "higher"
    """Better values of the goal: higher (accuracies) or lower (losses)."""
    best_over: list[str] = pydantic.Field(default=[])
    """Axes over which the table shows the best value only, such as the learning rate."""
    columns: dict[str, str] = pydantic.Field(default={})
    """Fields of the table by their headings: of metrics.jsonl, at the step of the goal's best value, or of the
    evaluations, "evaluations/SUITE/NAME/METRIC". A field with * is the mean of all that match, such as
    "tasks/*/bits_per_byte". Without any, the goal."""
    stop: StopConfig = StopConfig()
    search: SearchConfig | None = None
    """Short runs that choose the value of one axis; left out: every combination trains in full."""
    repetitions: list[RepetitionConfig] = pydantic.Field(default=[])
    """Further runs of some combinations. Runs whose goals differ by less than twice the spread of the repetitions share
    a rank."""
    evaluations: EvaluationsConfig | None = None
    """Evaluations of each run that has ended; left out: none."""

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
        problems += self._search_problems()
        for index, repetition in enumerate(self.repetitions):
            problems += self._repetition_problems(repetition)
            if repetition.of in [each.of for each in self.repetitions[:index]]:
                problems.append(f"repetitions.of = {repetition.of} is given twice; put all runs into one table")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _search_problems(self) -> Iterator[str]:
        if self.search is not None:
            axis = self.search.axis
            if axis not in self.axes:
                yield f"search.axis: {axis!r} is no axis; use one of {', '.join(self.axes)}"
            if axis in self.best_over:
                yield f"best_over: {axis!r} is the axis of the search, of which one value trains in full; remove it"

    def _repetition_problems(self, repetition: RepetitionConfig) -> Iterator[str]:
        axes = [name for name in self.axes if self.search is None or name != self.search.axis]
        if set(repetition.of) != set(axes):
            yield f"repetitions.of = {repetition.of}: give one value of each of {', '.join(axes)}"
        for axis, value in repetition.of.items():
            if axis in axes and value not in self.axes[axis]:
                yield f"repetitions.of: {value!r} is no value of {axis}; {suggest(value, list(self.axes[axis]))}"
        if not repetition.runs:
            yield "repetitions.runs is empty; add a name with overrides, such as seed1 = ['train.seed=1']"
        for name in repetition.runs:
            if name == SEARCH or not _NAME.fullmatch(name):
                yield f"repetitions.runs: {name!r} is part of a folder's name; use letters and digits, not {SEARCH!r}"


def metric_name(field: str, values: Mapping[str, str]) -> str:
    """A field of metrics.jsonl with the run's values of the axes in place of {AXIS}."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], field)


class Sweep(NamedTuple):
    """A sweep read from its file."""

    path: Path
    config: SweepConfig
    frozen: Path | None = None
    """Copy of the config of the runs, of a sweep that has begun."""

    @property
    def run_config(self) -> Path:
        """The config of the runs."""
        return self.frozen or self.path.parent / self.config.config

    def goodness(self, goal: float) -> float:
        """The goal, negative where lower is better."""
        return goal if self.config.better == "higher" else -goal


def parse_sweep(path: Path) -> Sweep:
    """Reads the sweep's file alone.

    Raises:
        ConfigError: naming the problems of the file.
    """
    return Sweep(path, parse(SweepConfig, read_toml(path), str(path)))
