"""Work on a corpus in parts: planned from the files alone, distributed over processes and hosts, resumable."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from megalin.data.corpus.inputs import Span, split
from megalin.data.corpus.worker_pool import SPAWN, worker_pool
from megalin.errors import ConfigError, DataError
from megalin.files import open_input, read_input, storage_errors, write_text

_LEAST_PART_BYTES = 4 << 20
_MOST_PART_BYTES = 256 << 20
_PARTS = 256  # of a corpus between those limits
_RECORD_LIMIT_BYTES = 64 << 20
_REPORT_SECONDS = 0.5


class CorpusPart(NamedTuple):
    """Unit of work: a span of the corpus, a function of the input files alone."""

    number: int
    span: Span
    size_bytes: int  # the sizes of all parts of a file add up to the file's size
    first: bool  # of its file


class PartSubset(NamedTuple):
    """Parts that this run processes: those with part number = `number` (mod `total`)."""

    number: int
    total: int


class CorpusProgress(NamedTuple):
    """Counts so far, including those of a resumed run."""

    documents: int
    tokens: int
    read_bytes: int
    bad_lines: int


ReportProgress = Callable[[CorpusProgress], None]
"""Adds these counts to the progress."""
PartFunction = Callable[[Any, CorpusPart, Path, ReportProgress], Mapping[str, Any]]
"""(job, part, folder, report) -> the part's record; a module-level function that writes its files to `folder`."""


class Run(NamedTuple):
    """Settings of a run over the parts."""

    folder: Path  # of the parts; the same for all subsets
    settings: Mapping[str, Any]  # everything that the parts' contents depend on, besides the inputs
    workers: int
    resume: bool
    subset: PartSubset | None
    on_progress: Callable[[CorpusProgress], None]


def plan(paths: Sequence[Path]) -> list[CorpusPart]:
    """Splits the files into about 256 parts of 4 to 256 MiB, in their order. Raises DataError, and ConfigError."""
    total = sum(_size(path) for path in paths)
    part_bytes = min(max(total // _PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
    parts: list[CorpusPart] = []
    for path in paths:
        spans = split(path, part_bytes=part_bytes)
        width, size = max(spans[-1].end, 1), _size(path)  # of row groups in parquet
        bounds = [*(size * span.start // width for span in spans), size]
        for span, (start, end) in zip(spans, itertools.pairwise(bounds), strict=True):
            parts.append(CorpusPart(len(parts), span, end - start, span is spans[0]))
    return parts


def _size(path: Path) -> int:
    with open_input(path, remedy="check --input") as file:
        return os.fstat(file.fileno()).st_size


def _record_path(folder: Path, number: int) -> Path:
    """Path of a part's record, which is written after the part's files: its presence means the part is complete."""
    return folder / f"{number:06}.json"


def _read_record(folder: Path, number: int) -> dict[str, Any] | None:
    """Record of a part, or None where it is not complete. Raises DataError."""
    path = _record_path(folder, number)
    if not path.exists():
        return None
    return dict(_read_json(path))


def records(folder: Path, parts: Sequence[CorpusPart]) -> Iterator[dict[str, Any]]:
    """Yields the record of each part; all must be complete. Raises DataError."""
    for part in parts:
        record = _read_record(folder, part.number)
        assert record is not None, part
        yield record


def run_parts(work: PartFunction, job: Any, parts: Sequence[CorpusPart], run: Run) -> bool:
    """Processes the parts of this run's subset without a record; True once every part of the corpus has one.

    Without `resume` a run starts from the beginning. The first part that fails ends it; complete parts stay for
    `resume`.

    Raises:
        ConfigError: bad `workers` or `subset`.
        DataError: the folder is of another corpus or other settings; a worker died; and as `work` does.
        StorageError: the folder cannot be written.
    """
    _check(run)
    _prepare(run, parts)
    subset = run.subset or PartSubset(0, 1)
    mine = [part for part in parts if part.number % subset.total == subset.number]
    done, left = CorpusProgress(0, 0, 0, 0), []
    for part in mine:
        record = _read_record(run.folder, part.number)
        if record is None:
            left.append(part)
        else:
            done = _sum(done, CorpusProgress(*record["progress"]))
    run.on_progress(done)
    if run.workers == 1 or len(left) < 2:
        _run_here(work, job, left, run, done)
    else:
        _run_in_workers(work, job, left, run, done)
    return all(_record_path(run.folder, part.number).exists() for part in parts)


def discard(folder: Path) -> None:
    """Removes the parts, renaming the folder first, so that a killed removal leaves no folder of that name.

    Raises:
        StorageError: the folder cannot be removed.
    """
    doomed = folder.with_name(folder.name + ".removed")
    with storage_errors(folder):
        if doomed.exists():
            shutil.rmtree(doomed)
        os.replace(folder, doomed)
        shutil.rmtree(doomed)


def _check(run: Run) -> None:
    if run.workers < 1:
        raise ConfigError(f"--workers {run.workers}: must be at least 1")
    if run.subset is not None and not 0 <= run.subset.number < run.subset.total:
        raise ConfigError(f"--shard {run.subset.number}/{run.subset.total}: give i/n with i from 0 to n - 1")


def _prepare(run: Run, parts: Sequence[CorpusPart]) -> None:
    """Creates the folder, or reuses it if every run that wrote to it had the same plan. Raises DataError."""
    if run.folder.exists() and not run.resume and run.subset is None:
        discard(run.folder)
    with storage_errors(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)
    inputs = {part.span.path: _identity(part.span.path) for part in parts if part.first}
    ours = {"settings": dict(run.settings), "inputs": inputs, "parts": len(parts)}
    for path in sorted(run.folder.glob("plan-*.json")):
        for name, value in _differences(ours, _read_json(path)):
            raise DataError(
                f"{path}: these parts were made with another {name}: {value}; remove the folder {run.folder} to start "
                "again, or use the original options and inputs"
            )
    subset = run.subset or PartSubset(0, 1)
    write_text(run.folder / f"plan-{subset.number}-of-{subset.total}.json", json.dumps(ours, indent=1) + "\n")
    if not run.resume:
        for part in parts[subset.number :: subset.total]:
            _record_path(run.folder, part.number).unlink(missing_ok=True)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for group, values in json.loads(json.dumps(ours)).items():
        other = theirs.get(group)
        if isinstance(values, dict) and isinstance(other, dict):
            for name in sorted({*values, *other}):
                if values.get(name) != other.get(name):
                    label = f"input {name}" if group == "inputs" else name
                    yield label, f"{other.get(name)}, now {values.get(name)}"
            for before, now in zip(other, values, strict=False):
                if group == "inputs" and before != now:  # the number of a part would be that of another file's part
                    yield "order of inputs", f"{before}, now {now}"
        elif values != other:
            yield f"number of {group}", f"{other}, now {values}"


def _identity(path: str) -> list[int]:
    with open_input(Path(path), remedy="check --input") as file:
        status = os.fstat(file.fileno())
    return [status.st_size, status.st_mtime_ns]


def _read_json(path: Path) -> dict[str, Any]:
    data = read_input(path, limit_bytes=_RECORD_LIMIT_BYTES, remedy=f"remove {path.parent} and start again")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object; remove {path.parent} and start again")
    return value


def _sum(one: CorpusProgress, other: CorpusProgress) -> CorpusProgress:
    return CorpusProgress(*(a + b for a, b in zip(one, other, strict=True)))


def _do(work: PartFunction, job: Any, part: CorpusPart, folder: Path, report: ReportProgress) -> None:
    """Processes one part: its files, then its record; bytes that `work` has not reported are reported at the end."""
    total = CorpusProgress(0, 0, 0, 0)

    def counted(step: CorpusProgress) -> None:
        nonlocal total
        total = _sum(total, step)
        report(step)

    record = dict(work(job, part, folder, counted))
    counted(CorpusProgress(0, 0, part.size_bytes - total.read_bytes, 0))
    write_text(_record_path(folder, part.number), json.dumps({**record, "progress": total}) + "\n")


def _run_here(work: PartFunction, job: Any, parts: Sequence[CorpusPart], run: Run, done: CorpusProgress) -> None:
    state = done

    def report(step: CorpusProgress) -> None:
        nonlocal state
        state = _sum(state, step)
        run.on_progress(state)

    for part in parts:
        _do(work, job, part, run.folder, report)


def _run_in_workers(work: PartFunction, job: Any, parts: Sequence[CorpusPart], run: Run, done: CorpusProgress) -> None:
    counts = SPAWN.Array("q", len(done) + 1)  # the last is not 0 once the other workers must stop
    workers = min(run.workers, len(parts))

    def show() -> None:
        with counts.get_lock():
            run.on_progress(_sum(done, CorpusProgress(*counts[:-1])))

    initializer = functools.partial(_take_counts, counts)
    with worker_pool(workers, limit="--max-document-bytes", initializer=initializer) as pool:
        try:
            futures: list[Future[None]] = [pool.submit(_do_in_worker, work, job, part, run.folder) for part in parts]
            for future in futures:
                while not wait([future], _REPORT_SECONDS).done:
                    show()
                future.result()
            show()
        finally:
            counts[-1] = 1


class _StoppedError(Exception):
    """Stops this part because another one has failed."""


_worker_report: list[ReportProgress] = []  # of this worker process; empty in the parent


def _take_counts(counts: Any) -> None:
    _worker_report.append(functools.partial(_add, counts))


def _add(counts: Any, step: CorpusProgress) -> None:
    with counts.get_lock():
        for k, value in enumerate(step):
            counts[k] += value
        if counts[-1]:
            raise _StoppedError


def _do_in_worker(work: PartFunction, job: Any, part: CorpusPart, folder: Path) -> None:
    _do(work, job, part, folder, _worker_report[0])
