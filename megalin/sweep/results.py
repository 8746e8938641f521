"""Results of a sweep's runs: their file, and the metrics and evaluations in them by the names of columns."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalin.errors import ConfigError, DataError
from megalin.evaluation.results import read_results as read_evaluations
from megalin.files import read_input, storage_errors, write_atomically
from megalin.sweep.config import Sweep, metric_name
from megalin.sweep.progress import Status

RESULTS = "results.json"
"""Results of the finished runs, in the sweep's folder."""
_RESULTS_BYTES = 64 * 2**20
_REMEDY = "move it away: the runs then go on from their own folders"


class Result(NamedTuple):
    """Outcome of one run."""

    values: Mapping[str, str]
    """Its value of each axis."""
    overrides: list[str]
    """Overrides of its config."""
    status: Status
    steps: int
    tokens: int
    seconds: float
    """Wall time of its training process, start included; of the last process where the run was continued."""
    tokens_per_second: float | None
    """Median over the steps."""
    best: dict[str, Any]
    """Metrics of the step with the best goal; empty without an evaluation."""
    error: str = ""
    """Last lines of its output, where it failed."""
    stage: str = ""
    """The stage of its cell."""
    evaluations: Mapping[str, float] = {}
    """Results of the suites of `evaluations` as evaluations/SUITE/NAME/METRIC."""
    evaluation_seconds: float = 0.0
    """Wall time of the process of these evaluations."""

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return run_name(self.values, self.stage)

    @property
    def title(self) -> str:
        """Its values and stage with spaces between."""
        return " ".join([*self.values.values(), *([self.stage] if self.stage else [])])


def run_name(values: Mapping[str, str], stage: str) -> str:
    """The name of a run's folder."""
    return "-".join([*values.values(), *([stage] if stage else [])])


def goal_value(sweep: Sweep, result: Result) -> float:
    """The best goal of a run that was evaluated."""
    return float(result.best[metric_name(sweep.config.goal, result.values)])


def field_value(result: Result, field: str) -> Any:
    """A field of the best step's metrics or of the evaluations, the mean over all that match one with *; None where
    there is none."""
    found, name = {**result.best, **result.evaluations}, metric_name(field, result.values)
    if "*" not in name:
        return found.get(name)
    pattern = re.compile(".*".join(re.escape(part) for part in name.split("*")))
    matches = [float(value) for key, value in found.items() if pattern.fullmatch(key)]
    return statistics.fmean(matches) if matches else None


def evaluation_values(run: Path, step: int) -> dict[str, float]:
    """Results of the evaluations of a checkpoint by evaluations/SUITE/NAME/METRIC; empty without any.

    Raises:
        DataError: the file is not one of results.
    """
    values = {}
    for suite, results in read_evaluations(run, step).items():
        for name, result in results.items():
            metrics = {key: metric["value"] for key, metric in result.get("metrics", {}).items()}
            for metric, value in (metrics or result).items():
                if isinstance(value, int | float) and math.isfinite(value):
                    values[f"evaluations/{suite}/{name}/{metric}"] = value
    return values


def read_results(folder: Path, overrides: Mapping[str, Sequence[str]]) -> dict[str, Result]:
    """Results by the run's name, without those that a new start continues.

    Args:
        overrides: those of each run of the sweep by its name; results of other runs are left out.

    Raises:
        ConfigError: the results are of other overrides.
        DataError: the file is damaged or cannot be read.
    """
    path = folder / RESULTS
    if not path.exists():
        return {}
    data = read_input(path, limit_bytes=_RESULTS_BYTES, remedy=_REMEDY)
    try:
        saved = json.loads(data)
        found = [Result(**{**values, "status": Status(values["status"])}) for values in saved["results"]]
        results = {result.name: result for result in found if result.name in overrides}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not the results of a sweep: {error!r}; {_REMEDY}") from None
    changed = [name for name, result in results.items() if result.overrides != overrides[name]]
    if changed:
        raise ConfigError(
            f"{path} holds results with other overrides of {changed[0]}; give a new folder, or restore the file"
        )
    return {name: result for name, result in results.items() if result.status not in (Status.CUT, Status.FAILED)}


def write_results(folder: Path, results: Mapping[str, Result]) -> None:
    """Writes the file of results. Raises StorageError."""
    values = {"results": [result._asdict() for result in results.values()]}
    with storage_errors(folder / RESULTS):
        write_atomically(folder / RESULTS, json.dumps(values, indent=1).encode())
