"""The runs of a sweep in order: those of each combination, short ones of its search first, then the repetitions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.evaluation.in_loop import check_run
from megalin.layers.external_mixers import external_types
from megalin.sweep.config import SEARCH, Sweep, parse_sweep
from megalin.sweep.progress import Status
from megalin.sweep.results import Result, goal_value, run_name
from megalin.train.config import load_run_config


class Cell(NamedTuple):
    """One run of a sweep."""

    values: dict[str, str]
    """Its value of each axis."""
    overrides: list[str]
    """Overrides of its config."""
    stage: str = ""
    """SEARCH for a short run of a search, the name of a repetition, or empty."""

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return run_name(self.values, self.stage)


def make_cell(sweep: Sweep, values: Mapping[str, str], stage: str = "") -> Cell:
    """The run of a combination."""
    config = sweep.config
    ordered = {axis: values[axis] for axis in config.axes}
    overrides = [*config.overrides, *(each for axis, value in ordered.items() for each in config.axes[axis][value])]
    if stage == SEARCH:
        assert config.search is not None
        overrides += config.search.overrides
    elif stage:
        own = (each for each in config.repetitions if each.of.items() <= values.items() and stage in each.runs)
        overrides += next(own).runs[stage]
    return Cell(ordered, overrides, stage)


def external_mixers(sweep: Sweep, cell: Cell) -> list[str]:
    """The mixers of other packages in a run's config."""
    model = load_run_config(sweep.run_config, cell.overrides).model
    return list(dict.fromkeys(external_types(model.model_dump())))


def groups(sweep: Sweep) -> Iterator[list[Cell]]:
    """The combinations, the last axis fastest; with a search, those that differ in its axis alone together."""
    axes, search = sweep.config.axes, sweep.config.search
    searched = [] if search is None else [search.axis]
    others = [axis for axis in axes if axis not in searched]
    for values in itertools.product(*(axes[axis] for axis in others)):
        chosen = dict(zip(others, values, strict=True))
        tried = itertools.product(*(axes[axis] for axis in searched))
        yield [make_cell(sweep, chosen | dict(zip(searched, each, strict=True))) for each in tried]


def all_cells(sweep: Sweep) -> Iterator[Cell]:
    """Every run that the results may ask for."""
    for cells in groups(sweep):
        for cell in cells:
            if sweep.config.search is not None:
                yield make_cell(sweep, cell.values, SEARCH)
            yield cell
            yield from _repetitions(sweep, cell)


def ordered_cells(sweep: Sweep, results: Mapping[str, Result]) -> Iterator[Cell | None]:
    """The sweep's runs in order, also those with a result; None in place of one whose search is not finished."""
    repeated: list[Cell | None] = []
    for cells in groups(sweep):
        if sweep.config.search is None:
            chosen: Cell | None = cells[0]
            yield chosen
        else:
            tries = [make_cell(sweep, cell.values, SEARCH) for cell in cells]
            yield from tries
            best = best_try(sweep, [results[cell.name] for cell in tries if cell.name in results])
            finished = all(cell.name in results and results[cell.name].status is not Status.CUT for cell in tries)
            if finished and best is None:
                continue  # no value of the axis trains
            chosen = make_cell(sweep, best.values) if finished and best is not None else None
            yield chosen
        if chosen is None:
            count = len(list(_repetitions(sweep, cells[0])))
            repeated += [None] * count
        else:
            repeated += _repetitions(sweep, chosen)
    yield from repeated


def best_try(sweep: Sweep, tried: list[Result]) -> Result | None:
    """The run with the best goal; None without one."""
    found = [result for result in tried if result.best]
    return max(found, key=lambda each: sweep.goodness(goal_value(sweep, each)), default=None)


def _repetitions(sweep: Sweep, cell: Cell) -> Iterator[Cell]:
    for repetition in sweep.config.repetitions:
        if repetition.of.items() <= cell.values.items():
            yield from (make_cell(sweep, cell.values, name) for name in repetition.runs)


def expected_seconds(sweep: Sweep, cell: Cell, results: Mapping[str, Result]) -> float | None:
    """Expected wall time of a run, evaluations included; None without a run to derive it from.

    That of runs of the same kind, full or short, which differ in the searched axis or are repetitions; else of its own
    short run, prolonged at that run's rate; else of the longest run of its kind.
    """
    search = sweep.config.search
    others = {axis: value for axis, value in cell.values.items() if search is None or axis != search.axis}
    finished = [each for each in results.values() if each.status not in (Status.CUT, Status.FAILED)]
    kind = [each for each in finished if (each.stage == SEARCH) == (cell.stage == SEARCH)]
    evaluating = max((each.evaluation_seconds for each in kind), default=0.0)
    same = [each for each in kind if others.items() <= each.values.items()]
    tried = [each for each in finished if each.stage == SEARCH and each.values == cell.values]
    if not same and tried and tried[0].tokens_per_second:
        config = load_run_config(sweep.run_config, cell.overrides)
        tokens = config.train.steps * config.train.global_batch_size * config.data.sequence_length
        return tried[0].seconds + (tokens - tried[0].tokens) / tried[0].tokens_per_second + evaluating
    return max((each.seconds + each.evaluation_seconds for each in same or kind), default=None)


def read_sweep(path: Path) -> Sweep:
    """Reads the sweep's file and the config of each of its runs, and checks each as `megalin train` in one process.

    Raises:
        ConfigError: naming the problems of the file, or of the first run that `train` would refuse.
    """
    sweep = parse_sweep(path)
    for cell in all_cells(sweep):
        try:
            check_run(load_run_config(sweep.run_config, cell.overrides), 1)
        except ConfigError as error:
            raise ConfigError(f"run {cell.name} of {path}: {error}") from None
    return sweep
