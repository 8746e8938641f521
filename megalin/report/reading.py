"""Reads a run folder for the report, at any stage of the run; any file in it may be missing or damaged."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from megalin.checkpoint.manifest import directory_step, read_manifest
from megalin.errors import CheckpointError, ConfigError, DataError
from megalin.files import open_regular
from megalin.structured_text import parse_json, parse_toml
from megalin.train.curves import EVALUATION, finite
from megalin.train.identity_file import IdentityFile, read_identity
from megalin.train.jsonl import read_records
from megalin.train.tasks import split_task_metrics

CURVES = ("loss", "mlm_loss", "nsp_loss", "learning_rate", "tokens_per_second", "grad_norm", "tokens", "flops")
"""Metrics whose values are kept for all steps."""
SUMS = ("step_seconds", "data_wait_seconds")
"""Metrics that are summed over the steps."""
_RESULTS_NAME = re.compile(r"step-(\d{1,15})\.json")
_TEXT_LIMIT_BYTES = 1 << 22
"""Most bytes that are read of a config or a JSON file."""


class MetricsSummary(NamedTuple):
    """Summary of metrics.jsonl."""

    curves: dict[str, list[tuple[int, float]]]
    """(step, value) by name, finite values only."""
    sums: dict[str, float]
    """By name, over all steps."""
    last: dict[str, float]
    """The finite numbers of the newest line; empty before the first."""
    evaluations: list[dict[str, float]]
    """For each line with an evaluation: the step and the evaluation's numbers, their names without the prefix."""
    tasks: list[tuple[int, str, dict[str, float]]]
    """(step, task, its numbers by metric) of each evaluation of a task."""
    peak_memory_bytes: float
    """Largest of any step."""


class Incident(NamedTuple):
    """A line of incidents.jsonl."""

    step: int
    time: str
    kind: str
    message: str


class SavedCheckpoint(NamedTuple):
    """The newest checkpoint with a readable manifest; its files are not hashed."""

    name: str
    step: int
    num_files: int
    num_bytes: int
    written: datetime


class StoredResult(NamedTuple):
    """A result of `megalin eval` or `megalin lm-eval` in the run folder."""

    step: int
    """Finished steps of the evaluated checkpoint."""
    suite: str
    task: str
    metrics: dict[str, float]
    """Finite numbers only."""


class RunRecord(NamedTuple):
    """Content of a run folder."""

    path: Path
    config_text: str
    """Text of config.toml; empty if there is none."""
    config: dict[str, Any]
    """Values of config.toml; empty if it is not TOML."""
    progress: MetricsSummary
    updated: datetime | None
    """Time of the last write to metrics.jsonl."""
    incidents: list[Incident]
    environment: dict[str, Any]
    kernels: dict[str, Any]
    identity: IdentityFile | None
    """None of a run of an earlier version, or where it is not readable."""
    checkpoint: SavedCheckpoint | None
    results: list[StoredResult]
    """Content of evaluations/step-N.json, by rising step."""
    problems: list[str]
    """Files that exist and cannot be read, with the reason."""

    def number(self, table: str, key: str) -> float | None:
        """A finite number of the config, or None."""
        values = self.config.get(table)
        return finite(values.get(key)) if isinstance(values, dict) else None


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run folder, also while the run is in progress.

    Raises:
        ConfigError: `folder` contains no run.
    """
    path = Path(folder)
    names = ("config.toml", "metrics.jsonl", "incidents.jsonl")
    if not any((path / name).exists() for name in names):
        raise ConfigError(f"{path}: no run in this folder (none of {', '.join(names)}); give a run folder")
    problems: list[str] = []
    config_text = _text(path / "config.toml", problems)
    metrics = path / "metrics.jsonl"
    return RunRecord(
        path=path,
        config_text=config_text,
        config=_toml(config_text, problems),
        progress=_progress(_records(metrics, problems)),
        updated=datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if metrics.exists() else None,
        incidents=[_incident(record) for record in _records(path / "incidents.jsonl", problems)],
        environment=_json(path / "environment.json", problems),
        kernels=_json(path / "kernels.json", problems),
        identity=_identity(path, problems),
        checkpoint=_newest_checkpoint(path / "checkpoints", problems),
        results=_results(path / "evaluations", problems),
        problems=problems,
    )


def _identity(path: Path, problems: list[str]) -> IdentityFile | None:
    try:
        return read_identity(path)
    except DataError as error:
        problems.append(str(error))
        return None


def _progress(records: Iterator[dict[str, Any]]) -> MetricsSummary:
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    sums = dict.fromkeys(SUMS, 0.0)
    evaluations: list[dict[str, float]] = []
    tasks: list[tuple[int, str, dict[str, float]]] = []
    numbers: dict[str, float] = {}
    peak = 0.0
    for record in records:
        numbers = {name: number for name, value in record.items() if (number := finite(value)) is not None}
        step = int(numbers["step"])
        for name, points in curves.items():
            if name in numbers:
                points.append((step, numbers[name]))
        for name in sums:
            sums[name] += numbers.get(name, 0.0)
        peak = max(peak, numbers.get("peak_memory_bytes", 0.0))
        found = {name.removeprefix(EVALUATION): numbers[name] for name in numbers if name.startswith(EVALUATION)}
        if found:
            evaluations.append({"step": step, **found})
        tasks += [(step, task, values) for task, values in split_task_metrics(numbers).items()]
    return MetricsSummary(curves, sums, numbers, evaluations, tasks, peak)


def _incident(record: dict[str, Any]) -> Incident:
    return Incident(record["step"], *(str(record.get(name, "")) for name in ("time", "kind", "message")))


def _records(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    try:
        yield from (record for record in read_records(path) if finite(record["step"]) is not None)
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")


def _text(path: Path, problems: list[str]) -> str:
    try:
        with io.BufferedReader(open_regular(path, follow_links=False)) as file:
            return file.read(_TEXT_LIMIT_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror or error})")
        return ""


def _toml(text: str, problems: list[str]) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        problems.append(f"config.toml: not TOML ({error})")
        return {}


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    if not (text := _text(path, problems)):
        return {}
    try:
        values = parse_json(text)
    except ValueError as error:
        problems.append(f"{path.name}: not JSON ({error})")
        return {}
    if not isinstance(values, dict):
        problems.append(f"{path.name}: not a JSON object")
        return {}
    return values


def _results(folder: Path, problems: list[str]) -> list[StoredResult]:
    """The stored results by step, suite and task; other content of the files is left out."""
    if not folder.is_dir():
        return []
    steps = {int(found[1]): entry for entry in folder.iterdir() if (found := _RESULTS_NAME.fullmatch(entry.name))}
    results = []
    for step, path in sorted(steps.items()):
        suites = _json(path, problems).get("suites")
        for suite, tasks in suites.items() if isinstance(suites, dict) else ():
            for task, entry in tasks.items() if isinstance(tasks, dict) else ():
                if isinstance(entry, dict) and (metrics := _metrics(entry.get("metrics", entry))):
                    results.append(StoredResult(step, suite, task, metrics))
    return results


def _metrics(values: Any) -> dict[str, float]:
    """The finite numbers of an object: plain ones, or the `value` of an object."""
    items = values.items() if isinstance(values, dict) else ()
    numbers = {name: finite(item.get("value") if isinstance(item, dict) else item) for name, item in items}
    return {name: number for name, number in numbers.items() if number is not None}


def _newest_checkpoint(folder: Path, problems: list[str]) -> SavedCheckpoint | None:
    if not folder.is_dir():
        return None
    names = [entry.name for entry in folder.iterdir() if directory_step(entry.name) is not None]
    for name in sorted(names, key=lambda name: directory_step(name) or 0, reverse=True):
        try:
            manifest = read_manifest(folder / name)
            written = datetime.fromtimestamp((folder / name).stat().st_mtime, UTC)
        except (CheckpointError, OSError) as error:
            problems.append(f"checkpoints/{name}: {error}")
            continue
        size = sum(record.size for record in manifest.files.values())
        return SavedCheckpoint(name, manifest.step, len(manifest.files), size, written)
    return None
