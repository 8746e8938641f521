"""Runs of a sweep as processes of `megalin train`, several at a time, and the file of their results."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megalin.errors import ConfigError, PreemptedError
from megalin.files import storage_errors
from megalin.sweep.config import SEARCH, EvaluationsConfig, Sweep
from megalin.sweep.frozen import freeze
from megalin.sweep.order import Cell, all_cells, expected_seconds, external_mixers, ordered_cells
from megalin.sweep.process import RunProcess, ended_with, environments, train_command
from megalin.sweep.progress import Progress, Status, remove_unsaved_steps
from megalin.sweep.results import Result, evaluation_values, read_results, write_results
from megalin.train.preemption import PreemptionHandler

_POLL_SECONDS = 0.2


class _Running:
    """A run that trains, or whose evaluations run after that."""

    def __init__(self, sweep: Sweep, cell: Cell, folder: Path, environment: Mapping[str, str]) -> None:
        self.cell, self._folder, self._environment = cell, folder / cell.name, environment
        self._evaluations = None if cell.stage == SEARCH else sweep.config.evaluations
        remove_unsaved_steps(self._folder)
        self._mixers = external_mixers(sweep, cell) if self._evaluations else []
        self.progress = Progress(sweep.config, cell.values, self._folder / "metrics.jsonl")
        self._log = folder / f"{cell.name}.log"
        with storage_errors(self._log):
            self._log.write_bytes(b"")
        self._trained: Result | None = None
        self._start(train_command(sweep.run_config, self._folder, cell.overrides))

    def _start(self, command: list[str]) -> None:
        self._ended_by: Status | None = None
        self._process = RunProcess(command, self._log, self._environment)

    def poll(self) -> Result | None:
        """Asks the run to end where its progress says so, and starts its evaluations; the result at their end."""
        ended = self._process.poll()  # before the metrics, so that none are missed
        if self._trained is None:
            self.progress.update()
        if ended is None:
            if self._trained is None and self.progress.status is not None:
                self.end(self.progress.status)
            return None
        if self._trained is not None:
            return self._evaluated(self._trained, ended)
        result = self._result(ended)
        if self._evaluations is None or result.status in (Status.CUT, Status.FAILED):
            return result
        self._trained = result
        self._start(evaluate_command(self._folder, self._evaluations, self._mixers))
        return None

    def end(self, status: Status) -> None:
        """Asks the run to save and end, once."""
        if self._ended_by is None:
            self._ended_by = status
            self._process.end()

    def cut(self) -> None:
        """Asks the run to save and end with the sweep."""
        self.end(Status.CUT)

    def wait(self) -> None:
        """Waits for the end of the process."""
        self._process.wait()

    def _result(self, code: int) -> Result:
        progress, status, error = self.progress, Status.COMPLETE, ""
        if code in (PreemptedError.exit_code, -signal.SIGTERM) and self._ended_by is not None:
            status = self._ended_by  # -SIGTERM: it had not begun to train
        elif code != 0:
            status, error = Status.FAILED, self._process.error(code)
        return Result(
            self.cell.values,
            self.cell.overrides,
            status,
            progress.steps,
            progress.tokens,
            self._process.seconds,
            progress.tokens_per_second(),
            progress.best,
            error,
            self.cell.stage,
        )

    def _evaluated(self, trained: Result, code: int) -> Result:
        """The result with those of its evaluations."""
        seconds = self._process.seconds
        if code == 0:
            values = evaluation_values(self._folder, trained.steps)
            return trained._replace(evaluations=values, evaluation_seconds=seconds)
        if self._ended_by is not None:
            return trained._replace(status=self._ended_by)
        return trained._replace(status=Status.FAILED, error=self._process.error(code))


def evaluate_command(folder: Path, evaluations: EvaluationsConfig, mixers: Sequence[str]) -> list[str]:
    """The command of a run's evaluations, as a user would give it. `mixers`: of other packages, in the run's config."""
    named = [f"--mixers={name}" for name in mixers]
    return [sys.executable, "-m", "megalin", "eval", str(folder), *evaluations.arguments(), *named]


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    processes: int,
    time_limit: float | None = None,
    restart_changed: bool = False,
    on_result: Callable[[Result, int, list[Result]], None] = lambda result, left, results: None,
) -> list[Result]:
    """Trains the runs of a sweep that have no result yet, in order; the results of all runs that have one.

    Each run has a folder `folder`/NAME, so it can be read by `megalin eval` and `report`, and the sweep can be started
    again after it was ended: runs that were cut or failed go on from their checkpoints, and start anew where only the
    file of results is left. SIGTERM, as the time limit, and an exception, as by Ctrl-C, make the runs in progress save
    and end first.

    Args:
        processes: runs at a time. With several GPUs they are divided over them.
        time_limit: seconds after which running ones are asked to save and end; None: no limit. After the first one, no
            run starts that would not end in this time by the duration of those before it.
        restart_changed: removes runs that an edit of the files changes, which then start from scratch.
        on_result: called with each result, the number of runs without one, and all results.

    Raises:
        ConfigError: processes below 1, a time limit that is not positive, or files that changed since the first start.
        DataError: the folder's file of results is damaged.
        StorageError: the folder cannot be written.
    """
    _check_arguments(processes, time_limit)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    deadline = math.inf if time_limit is None else time.perf_counter() + time_limit
    sweep, restarted = freeze(sweep, folder, restart_changed=restart_changed)
    results = read_results(
        folder, {each.name: each.overrides for each in all_cells(sweep) if each.name not in restarted}
    )
    slot_environments = environments(processes)
    slots: list[_Running | None] = [None] * processes
    with ended_with(slots), PreemptionHandler() as preemption:
        left, changed = math.inf, True
        while changed or any(slots):
            expired = time.perf_counter() > deadline or preemption.received
            search, changed = changed and not expired, False  # runs become ready, or short enough, by results alone
            for index, running in enumerate(slots):
                if running is None:
                    if search and (cell := _next_cell(sweep, results, slots, left)) is not None:
                        slots[index] = _Running(sweep, cell, folder, slot_environments[index])
                        left = deadline - time.perf_counter()
                    continue
                if expired:
                    running.end(Status.CUT)
                if (result := running.poll()) is not None:
                    slots[index], changed, left = None, True, deadline - time.perf_counter()
                    results[running.cell.name] = result
                    write_results(folder, results)
                    cells = ordered_cells(sweep, results)
                    missing = sum(cell is None or cell.name not in results for cell in cells)
                    on_result(result, missing, _in_order(sweep, results))
            time.sleep(_POLL_SECONDS)
    return _in_order(sweep, results)


def _check_arguments(processes: int, time_limit: float | None) -> None:
    if processes < 1:
        raise ConfigError(f"processes = {processes}: use at least 1")
    if time_limit is not None and time_limit <= 0:
        raise ConfigError(f"time limit = {time_limit}: use a positive number of seconds, or leave it out")


def _in_order(sweep: Sweep, results: Mapping[str, Result]) -> list[Result]:
    return [results[cell.name] for cell in all_cells(sweep) if cell.name in results]


def _next_cell(
    sweep: Sweep, results: Mapping[str, Result], slots: Sequence[_Running | None], left: float
) -> Cell | None:
    """The first run that can start and would end in `left` seconds; None without one."""
    running = {slot.cell.name for slot in slots if slot is not None}
    for cell in ordered_cells(sweep, results):
        if cell is None or cell.name in results or cell.name in running:
            continue
        if left == math.inf or (expected_seconds(sweep, cell, results) or 0.0) <= left:
            return cell
    return None
