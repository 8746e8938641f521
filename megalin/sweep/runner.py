"""Runs of a sweep as processes of `megalin train`, several at a time, and the file of their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megalin.config import read_toml
from megalin.errors import ConfigError, PreemptedError
from megalin.files import read_limited, storage_errors, write_atomically
from megalin.sweep.config import Cell, Sweep
from megalin.sweep.progress import Progress, Status
from megalin.train.preemption import PreemptionHandler

RESULTS = "results.json"
"""Results of the finished runs, in the sweep's folder."""
_RESULTS_BYTES = 64 * 2**20
_POLL_SECONDS = 0.2
_ERROR_LINES = 5


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
    """Wall time of its process, start and evaluations included; of the last process where the run was continued."""
    tokens_per_second: float | None
    """Median over the steps."""
    best: dict[str, Any]
    """Metrics of the step with the best goal; empty without an evaluation."""
    error: str = ""
    """Last lines of its output, where it failed."""


class _Running:
    """A run that trains."""

    def __init__(self, sweep: Sweep, cell: Cell, folder: Path, environment: Mapping[str, str]) -> None:
        self.cell, self._folder = cell, folder / cell.name
        self.progress = Progress(sweep.config, cell.values, self._folder / "metrics.jsonl")
        self._log, self._started = folder / f"{cell.name}.log", time.perf_counter()
        self._ended_by: Status | None = None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                train_command(sweep.run_config, self._folder, cell.overrides),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its runs to save
            )

    def poll(self) -> Result | None:
        """Asks the run to end where its progress says so; the result once its process has ended."""
        ended = self._process.poll()  # before the metrics, so that none are missed
        self.progress.update()
        if ended is None:
            if self.progress.status is not None:
                self.end(self.progress.status)
            return None
        return self._result(ended)

    def end(self, status: Status) -> None:
        """Asks the run to save and end, once."""
        if self._ended_by is None:
            self._ended_by = status
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Waits for the end of the process."""
        self._process.wait()

    def _result(self, code: int) -> Result:
        progress, status, error = self.progress, Status.COMPLETE, ""
        if code in (PreemptedError.exit_code, -signal.SIGTERM) and self._ended_by is not None:
            status = self._ended_by  # -SIGTERM: it had not begun to train
        elif code != 0:
            status = Status.FAILED
            lines = self._log.read_text(errors="replace").splitlines()
            error = "\n".join([f"exit code {code}", *lines[-_ERROR_LINES:]])
        seconds = time.perf_counter() - self._started
        return Result(
            self.cell.values,
            self.cell.overrides,
            status,
            progress.steps,
            progress.tokens,
            seconds,
            progress.tokens_per_second(),
            progress.best,
            error,
        )


def train_command(config: Path, folder: Path, overrides: Sequence[str]) -> list[str]:
    """The command of a run, as a user would give it."""
    return [sys.executable, "-m", "megalin", "train", str(config), "--folder", str(folder), *overrides]


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    processes: int,
    time_limit: float | None = None,
    on_result: Callable[[Result, int], None] = lambda result, left: None,
) -> list[Result]:
    """Trains the runs of a sweep that have no result yet, in order; the results of all runs that have one.

    Each run has a folder `folder`/NAME, so it can be read by `megalin eval` and `report`, and the sweep can be started
    again after it was ended: runs that were cut or failed go on from their checkpoints. SIGTERM, as the time limit, and
    an exception, as by Ctrl-C, make the runs in progress save and end first.

    Args:
        processes: runs at a time. With several GPUs they are divided over them.
        time_limit: seconds after which running ones are asked to save and end, and no more are started; None: no limit.
        on_result: called with each result and the number of runs without one.

    Raises:
        ConfigError: processes below 1, a time limit that is not positive, or a folder with results of another config.
    """
    if processes < 1:
        raise ConfigError(f"processes = {processes}: use at least 1")
    if time_limit is not None and time_limit <= 0:
        raise ConfigError(f"time limit = {time_limit}: use a positive number of seconds, or leave it out")
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    results = _read_results(folder, sweep)
    left = [cell for cell in sweep.cells() if cell.name not in results]
    environments = _environments(processes)
    slots: list[_Running | None] = [None] * processes

    with _ended_with(slots), PreemptionHandler() as preemption:
        while left or any(slots):
            expired = time_limit is not None and time.perf_counter() - started > time_limit
            expired = expired or preemption.received
            if expired:
                left = []
            for index, running in enumerate(slots):
                if running is None:
                    if left:
                        slots[index] = _Running(sweep, left.pop(0), folder, environments[index])
                    continue
                if expired:
                    running.end(Status.CUT)
                if (result := running.poll()) is not None:
                    slots[index] = None
                    results[running.cell.name] = result
                    _write_results(folder, sweep, results)
                    on_result(result, len(left) + sum(slot is not None for slot in slots))
            time.sleep(_POLL_SECONDS)
    return [results[cell.name] for cell in sweep.cells() if cell.name in results]


@contextmanager
def _ended_with(slots: Sequence[_Running | None]) -> Iterator[None]:
    """Ends the runs where the sweep ends before them, by Ctrl-C or an error."""
    try:
        yield
    finally:
        running = [each for each in slots if each is not None]
        for each in running:
            each.end(Status.CUT)
        for each in running:
            each.wait()


def _environments(processes: int) -> list[dict[str, str]]:
    """Environment of each slot: its GPU, where there are several, and its number of CPU threads."""
    from torch.cuda import device_count

    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(device_count())))).split(",")
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    return [
        {"OMP_NUM_THREADS": threads}
        | ({"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if len(devices) > 1 else {})
        for slot in range(processes)
    ]


def _read_results(folder: Path, sweep: Sweep) -> dict[str, Result]:
    """Results by the run's name, without those that a new start continues."""
    path = folder / RESULTS
    if not path.exists():
        return {}
    saved = json.loads(read_limited(path, limit_bytes=_RESULTS_BYTES, follow_links=True))
    found = [Result(**{**values, "status": Status(values["status"])}) for values in saved["results"]]
    cells = {cell.name: cell for cell in sweep.cells()}
    results = {name: result for result in found if (name := "-".join(result.values.values())) in cells}
    changed = [name for name, result in results.items() if result.overrides != cells[name].overrides]
    if saved["config"] != read_toml(sweep.run_config) or changed:
        what = f"with other overrides of {changed[0]}" if changed else f"of another {sweep.run_config}"
        raise ConfigError(f"{path} holds results {what}; give a new folder, or restore the file")
    return {name: result for name, result in results.items() if result.status not in (Status.CUT, Status.FAILED)}


def _write_results(folder: Path, sweep: Sweep, results: Mapping[str, Result]) -> None:
    values = {"config": read_toml(sweep.run_config), "results": [result._asdict() for result in results.values()]}
    write_atomically(folder / RESULTS, json.dumps(values, indent=1).encode())
