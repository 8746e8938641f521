"""Results of evaluations in the run folder: RUN/evaluations/step-N.json, by suite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalin.errors import DataError, NumericError
from megalin.evaluation.suite import TaskResult
from megalin.files import exclusive, read_input, storage_errors, write_atomically

FOLDER_NAME = "evaluations"
_LIMIT_BYTES = 1 << 26
_REMEDY = "move it away to start with no results"


def results_path(run: Path, step: int) -> Path:
    """The file of the results of a checkpoint."""
    return run / FOLDER_NAME / f"step-{step}.json"


def read_results(run: Path, step: int) -> dict[str, dict[str, Any]]:
    """The results of a checkpoint by suite and name; empty where there are none.

    Raises:
        DataError: the file is not one of results.
    """
    path = results_path(run, step)
    if not path.exists():
        return {}
    try:
        values: Any = json.loads(read_input(path, limit_bytes=_LIMIT_BYTES, remedy=_REMEDY))
        if values["step"] != step:
            raise ValueError(f"step {values['step']!r} instead of {step}")
        suites: dict[str, dict[str, Any]] = values["suites"]
        if not all(isinstance(results, dict) for results in suites.values()):
            raise TypeError("a suite is not an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a file of results: {error}; {_REMEDY}") from None
    return suites


def parse_result(path: Path, entry: Mapping[str, Any]) -> TaskResult:
    """The result of a task from a file of results. Raises DataError for another content."""
    try:
        return TaskResult.from_values(entry)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a result of a task: {error!r}; {_REMEDY}") from None


def add_results(run: Path, step: int, suite: str, results: Mapping[str, Any]) -> None:
    """Adds results to those of a checkpoint, or replaces those of the same names. Readers find the old or the new file,
    and of two processes that add at the same time neither loses its results.

    Raises:
        DataError: the file is not one of results.
        NumericError: a result is not finite.
        StorageError: it cannot be written.
    """
    path = results_path(run, step)
    try:
        json.dumps(results, allow_nan=False)
    except ValueError as error:
        raise NumericError(
            f"{path}: not written: a result of the suite {suite} is not finite ({error}); evaluate an earlier step, or "
            'in a wider dtype: train.dtype="float32"'
        ) from None
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        with exclusive(path.parent / ".lock"):
            suites = read_results(run, step)
            suites[suite] = suites.get(suite, {}) | dict(results)
            text = json.dumps({"step": step, "suites": suites}, indent=1, allow_nan=False)
            write_atomically(path, (text + "\n").encode())
