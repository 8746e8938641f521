"""State of a ladder in its folder: the plan that it began with, and the results of its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from megalin.errors import DataError
from megalin.files import exclusive, read_input, storage_errors, write_atomically
from megalin.ladder.config import Ladder
from megalin.ladder.plan import LadderRun, Rung
from megalin.sweep.plan_file import refuse_changes

PLAN = "ladder.json"
"""The ladder's file and the config of its runs as they were when it began."""
CHOICE = "choice.json"
"""The factor that the trials of a mixer chose, in their folder."""
_LIMIT_BYTES = 1 << 24
_REMEDY = "remove it, or restore the ladder's folder"


class RunResult(NamedTuple):
    """Outcome of a run that has ended."""

    rung: str
    run: str
    mixer: str
    parameters: int
    """Without embeddings."""
    tokens: int
    """Training tokens, those of its trunk included."""
    flops: float
    """Forward and backward of these tokens, by the model's count."""
    steps: int
    learning_rate: float
    seconds: float
    """Wall time of the process that finished it."""
    loss: float | None
    """Held-out loss after the last step, nats a token; None where the run failed."""
    error: str = ""
    """Last lines of its output, where it failed."""

    @property
    def is_done(self) -> bool:
        """True after the last step with a held-out loss."""
        return self.loss is not None


def begin(ladder: Ladder, folder: Path) -> None:
    """Writes the plan into the folder, or compares it with the one that is there.

    Raises:
        ConfigError: the ladder began with another file or config; names what changed.
        StorageError: the folder cannot be written.
    """
    now, path = _plan(ladder), folder / PLAN
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / f"{PLAN}.guard"):
            if not path.exists():
                write_atomically(path, json.dumps(now, indent=1).encode())
    check_unchanged(ladder, folder)


def check_unchanged(ladder: Ladder, folder: Path) -> None:
    """Compares the ladder with the plan in its folder, if it has begun. Raises ConfigError, naming what changed."""
    path = folder / PLAN
    if not path.exists():
        return
    remedy = "or give another --folder"
    refuse_changes(_read(path), _plan(ladder), ladder.path, f"ladder in {folder}", remedy)


def _plan(ladder: Ladder) -> dict[str, Any]:
    plan = {"ladder": ladder.config.model_dump(mode="json"), "config": ladder.base}
    copied: dict[str, Any] = json.loads(json.dumps(plan, default=str))
    return copied


def result_path(folder: Path, rung: Rung, run: LadderRun) -> Path:
    """File of a run's result, next to its folder."""
    return folder / rung.name / f"{run.name}.json"


def read_result(folder: Path, rung: Rung, run: LadderRun) -> RunResult | None:
    """The result of a run; None where it has not ended. Raises DataError."""
    path = result_path(folder, rung, run)
    return _result(path) if path.exists() else None


def write_result(folder: Path, rung: Rung, run: LadderRun, result: RunResult) -> None:
    """Writes the result of a run. Raises StorageError."""
    path = result_path(folder, rung, run)
    with storage_errors(path):
        write_atomically(path, json.dumps(result._asdict(), indent=1).encode())


def finished_runs(folder: Path) -> list[tuple[Path, str]] | None:
    """Folders and mixers of a ladder's finished trunks and branches; None for a folder that is no ladder's.

    Raises:
        DataError: a file of the ladder that cannot be read.
    """
    if not (folder / PLAN).is_file():
        return None
    mixers = _mixers(folder / PLAN)
    results = [(path, _result(path)) for path in sorted(folder.glob("*/*.json"))]
    return [
        (path.with_suffix(""), result.mixer) for path, result in results if result.is_done and result.mixer in mixers
    ]


def chosen_factor(folder: Path, trials: Rung) -> float | None:
    """The factor on a mixer's rates that its trials chose; None before they have ended."""
    path = folder / trials.name / CHOICE
    if not path.exists():
        return None
    try:
        return float(_read(path)["factor"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: has no factor; remove it, so that the ladder chooses again") from None


def choose_factor(folder: Path, trials: Rung) -> float | None:
    """Writes the factor of the trial with the lowest loss, once all have ended; None where none has a loss.

    Raises:
        StorageError: the choice cannot be written.
    """
    results = [(run, read_result(folder, trials, run)) for run in trials.runs]
    losses = [(result.loss, run.factor) for run, result in results if result is not None and result.loss is not None]
    if not losses:
        return None
    (_, factor), path = min(losses), folder / trials.name / CHOICE
    with storage_errors(path):
        write_atomically(path, json.dumps({"factor": factor}).encode())
    return factor


def _result(path: Path) -> RunResult:
    try:
        return RunResult(**_read(path))
    except TypeError:
        raise DataError(f"{path}: not the result of a run; remove it, so that the ladder makes it again") from None


def _mixers(path: Path) -> dict[str, Any]:
    """The mixers of a plan, by name. Raises DataError where it has none."""
    table = _read(path).get("ladder")
    mixers = table.get("mixers") if isinstance(table, dict) else None
    if not isinstance(mixers, dict):
        raise DataError(f"{path}: not the plan of a ladder, which has a table ladder.mixers; {_REMEDY}")
    return mixers


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_input(path, limit_bytes=_LIMIT_BYTES, remedy=_REMEDY))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        values = None
    if not isinstance(values, dict):
        raise DataError(f"{path}: not a JSON object; {_REMEDY}")
    return values
