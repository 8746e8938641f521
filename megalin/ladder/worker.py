"""Execution of a ladder: rungs that this process locks, each with its runs one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalin.config import dumps
from megalin.errors import ConfigError, DataError, PreemptedError
from megalin.files import write_text
from megalin.ladder.config import Ladder
from megalin.ladder.lock import STALE_SECONDS, RungLock
from megalin.ladder.plan import LadderRun, Rung, run_config
from megalin.ladder.state import RunResult, begin, choose_factor, chosen_factor, read_result, write_result
from megalin.sweep.process import RunProcess, ended_with, environments, train_command
from megalin.train.curves import finite
from megalin.train.jsonl import read_records
from megalin.train.preemption import PreemptionHandler

_POLL_SECONDS = 0.2
LOCK = "lock"
"""Name of a rung's lock in its folder."""


class _RungWork:
    """A locked rung whose runs train one after the other, the trunk first."""

    def __init__(
        self, ladder: Ladder, rung: Rung, folder: Path, lock: RungLock, environment: Mapping[str, str], factor: float
    ) -> None:
        self.rung, self.lock = rung, lock
        self._ladder, self._folder, self._environment, self._factor = ladder, folder, environment, factor
        self._left = [run for run in rung.runs if not _is_done(folder, rung, run)]
        self._process: RunProcess | None = None
        self._was_cut = False

    @property
    def is_complete(self) -> bool:
        """Whether every run has ended by itself."""
        return not self._left

    def poll(self) -> tuple[list[RunResult], bool]:
        """The results since the last call, and whether the rung has ended."""
        if self._process is None:
            if self._was_cut or not self._left:
                return [], True
            self._start(self._left[0])
            return [], False
        code = self._process.poll()
        if code is None:
            return [], False
        if code and self._was_cut:
            return [], True
        run = self._left.pop(0)
        result = self._result(run, code)
        write_result(self._folder, self.rung, run, result)
        if not result.is_done and run is self.rung.runs[0] and not self.rung.is_search:
            self._left.clear()  # branches need the trunk
        self._process = None
        return [result], False

    def cut(self) -> None:
        """Asks the run to save and end, after which no other starts."""
        self._was_cut = True
        if self._process is not None:
            self._process.end()

    def wait(self) -> None:
        """Waits for the end of the run, and releases the rung."""
        if self._process is not None:
            self._process.wait()
        self.lock.release()

    def _start(self, run: LadderRun) -> None:
        path = self._folder / self.rung.name / run.name
        config = path.with_name(f"{run.name}.toml")
        write_text(config, dumps(run_config(self._ladder, self.rung, run, self._folder, factor=self._factor)))
        assert self.lock.descriptor is not None
        self._process = RunProcess(
            train_command(config, path, []),
            path.with_name(f"{run.name}.log"),
            self._environment,
            inherited=[self.lock.descriptor],
        )

    def _result(self, run: LadderRun, code: int) -> RunResult:
        assert self._process is not None
        rung, path = self.rung, self._folder / self.rung.name / run.name
        last = last_record(path / "metrics.jsonl")
        loss = finite(last.get("evaluation_loss")) if code == 0 and last.get("step") == run.steps else None
        error = ""
        if loss is None:
            error = self._process.error(code) if code else f"{path}/metrics.jsonl has no held-out loss at its end"
        tokens = run.steps * rung.tokens_per_step
        return RunResult(
            rung.name,
            run.name,
            rung.mixer,
            rung.shape.counts.non_embedding_parameters,
            tokens,
            float(tokens * rung.shape.counts.flops_per_token),
            run.steps,
            rung.learning_rate * (run.factor or self._factor),
            self._process.seconds,
            loss,
            error,
        )


def run_ladder(
    ladder: Ladder,
    rungs: Sequence[Rung],
    folder: Path,
    *,
    processes: int,
    stale_seconds: float = STALE_SECONDS,
    on_line: Callable[[str], None] = print,
) -> list[RunResult]:
    """Trains the rungs in `folder`, trials of rates first, then those with the most FLOPs; returns the new results.

    Each result is written as soon as its run has ended. Any number of workers may share the folder, on several hosts:
    each takes rungs that no living one holds, and stays until all of its own selection have ended. SIGTERM makes the
    runs in progress save and end.

    Args:
        rungs: with the trials of every mixer that is searched.
        processes: rungs at a time; with several GPUs they are divided over them.
        stale_seconds: age of the last heartbeat after which a worker of another host counts as dead.
        on_line: called with lines on the progress.

    Raises:
        ConfigError: processes below 1, or the ladder changed after it began.
        PreemptedError: after SIGTERM or Ctrl-C, with all runs saved.
    """
    if processes < 1:
        raise ConfigError(f"--processes {processes}: use at least 1")
    begin(ladder, folder)
    queue = _Queue(ladder, rungs, folder, stale_seconds, on_line)
    slots: list[_RungWork | None] = [None] * processes
    slot_environments, results = environments(processes), list[RunResult]()
    with ended_with(slots), PreemptionHandler() as preemption:
        while True:
            for index, work in enumerate(slots):
                if work is None:
                    if not preemption.received:
                        slots[index] = queue.take(slot_environments[index])
                    continue
                if preemption.received or work.lock.lost:
                    work.cut()
                new, ended = work.poll()
                results += new
                for result in new:
                    on_line(_line(result))
                if ended:
                    queue.finish(work)
                    slots[index] = None
            if not any(slots):
                if preemption.received:
                    raise PreemptedError(f"{preemption.received}: all runs are saved; run the same command to continue")
                if queue.is_empty():
                    return results
            time.sleep(_POLL_SECONDS)


class _Queue:
    """The rungs of one worker's selection that it has not tried yet."""

    def __init__(
        self,
        ladder: Ladder,
        rungs: Sequence[Rung],
        folder: Path,
        stale_seconds: float,
        on_line: Callable[[str], None],
    ) -> None:
        self._ladder, self._folder, self._stale, self._on_line = ladder, folder, stale_seconds, on_line
        self._trials = {rung.mixer: rung for rung in rungs if rung.is_search}
        self._waiting = sorted(rungs, key=lambda rung: (not rung.is_search, -rung.flops))
        self._running: list[Rung] = []
        self._reported: set[str] = set()

    def is_empty(self) -> bool:
        """Whether every rung has been tried, by this worker or another."""
        return not self._waiting

    def take(self, environment: Mapping[str, str]) -> _RungWork | None:
        """Locks the first rung that can start; None without one."""
        for rung in list(self._waiting):
            if _is_finished(self._folder, rung):
                self._waiting.remove(rung)
                continue
            factor = self._factor(rung)
            if factor is None:
                continue
            lock = RungLock.take(self._folder / rung.name / LOCK, stale_seconds=self._stale)
            if not isinstance(lock, RungLock):
                self._report(rung, f"held by {lock}")
                continue
            self._waiting.remove(rung)
            if _is_finished(self._folder, rung):  # by the worker that held it until now
                lock.release()
                continue
            self._running.append(rung)
            self._on_line(f"{rung.name}: starts")
            return _RungWork(self._ladder, rung, self._folder, lock, environment, factor)
        return None

    def finish(self, work: _RungWork) -> None:
        """Releases a rung; of trials that have ended, chooses the rate first."""
        rung = work.rung
        self._running.remove(rung)
        if rung.is_search and work.is_complete:
            factor = choose_factor(self._folder, rung)
            self._on_line(f"{rung.name}: " + ("no rate trains" if factor is None else f"rates times {factor:g}"))
        work.wait()
        if work.lock.lost:
            self._on_line(f"{rung.name}: taken by another worker, after this one had stood still")

    def _factor(self, rung: Rung) -> float | None:
        """The factor on a rung's rates; None while its mixer's trials have not ended. Rungs of a mixer whose trials
        have all failed are dropped."""
        trials = self._trials.get(rung.mixer)
        if trials is None or rung.is_search:
            return 1.0
        factor = chosen_factor(self._folder, trials)
        if factor is None and trials not in self._waiting and trials not in self._running:
            self._waiting.remove(rung)
            self._report(rung, "left out, as no rate of its search trains")
        return factor

    def _report(self, rung: Rung, text: str) -> None:
        line = f"{rung.name}: {text}"
        if line not in self._reported:
            self._reported.add(line)
            self._on_line(line)


def _is_done(folder: Path, rung: Rung, run: LadderRun) -> bool:
    result = read_result(folder, rung, run)
    return result is not None and result.is_done


def _is_finished(folder: Path, rung: Rung) -> bool:
    if rung.is_search:
        return chosen_factor(folder, rung) is not None
    return all(_is_done(folder, rung, run) for run in rung.runs)


def last_record(metrics: Path) -> dict[str, Any]:
    """The last line of a run's metrics; empty before the first. Raises DataError."""
    try:
        last: dict[str, Any] = {}
        for record in read_records(metrics):
            last = record
        return last
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{metrics}: cannot be read ({error.strerror}); fix the permissions") from None


def _line(result: RunResult) -> str:
    name = f"{result.rung}/{result.run}"
    if not result.is_done:
        return f"{name}: failed, {result.error}"
    return f"{name}: loss {result.loss:.4f} after {result.tokens:,} tokens, {result.seconds:.0f} s"
