"""Watchdog thread of a rank: watches the heartbeats of all ranks of its host, and ends a run that cannot go on.

The thread runs while the main thread waits in a collective, which leaves Python's lock to others. A C call that keeps
the lock stops the thread too: then the other ranks' watchdogs name this rank and end its process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple

from megalin.errors import RankFailedError, RankStalledError
from megalin.parallel.agreement import distributed
from megalin.parallel.blocked_calls import blocked_call
from megalin.parallel.diagnosis import RankView, StallLimits, Verdict, diagnose
from megalin.parallel.heartbeats import Heartbeat, HeartbeatFile
from megalin.parallel.host_exchange import HostExchange
from megalin.parallel.process_state import process_state
from megalin.parallel.rank_views import POLL_SECONDS, RankViews

LEAVE_SECONDS, LATEST_SECONDS = 2.5, 4.0
"""Time for a rank's main thread to leave by itself after another rank died, before its watchdog ends the process; and
before a thread without Python's lock does, where a C call of the main thread keeps the lock."""
LEAST_WARNING_SECONDS, WARNING_STEPS, WARNING_WINDOW = 15.0, 20.0, 50
"""A rank without progress is warned of after 20 times the median of the last 50 steps, 15 s at least."""
LEAST_STEPS = 3.0
"""A step may take three times the median of the last steps, if that is longer than the limit."""
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a rank write its stacks, whether or not its Python code can run."""


class WatchdogReport(NamedTuple):
    """Receivers of a watchdog's findings, called in its thread."""

    warn: Callable[[str], None]
    """A stall that the adaptive limit found."""
    end: Callable[[Verdict], None]
    """The verdict that ends the run; only on one rank."""


class Watchdog:
    """Watches the ranks of a heartbeat file.

    Args:
        file: the ranks of this host.
        heartbeat: this rank's, which writes into the file.
        rank: this rank.
        limits: longest times without progress.
        stacks: folder for the stacks of the ranks, one file each.
        report: receivers of the findings.
        ends: False where a stall is reported and does not end the process: a run of one process, in which nobody waits.
        exchange: source of the views of other hosts' ranks.
        ranks_per_stage: as for `diagnose`.
    """

    def __init__(
        self,
        file: HeartbeatFile,
        heartbeat: Heartbeat,
        rank: int,
        limits: StallLimits,
        stacks: Path,
        report: WatchdogReport,
        *,
        ends: bool = True,
        exchange: HostExchange | None = None,
        ranks_per_stage: int | None = None,
    ) -> None:
        self._ranks_per_stage = ranks_per_stage
        self._heartbeat, self._rank, self._limits = heartbeat, rank, limits
        self._report, self._ends, self._exchange = report, ends, exchange
        self._stacks_path = stacks / f"rank-{rank}.txt"
        self._stacks: IO[str] | None = None
        self._steps: deque[float] = deque(maxlen=WARNING_WINDOW)
        self._first_step: float | None = None
        self._views = RankViews(file)
        self._warned: tuple[object, ...] = ()
        self._verdict: Verdict | None = None
        self._decided, self._ended = threading.Event(), threading.Event()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="megalin-watchdog", daemon=True)

    @contextmanager
    def running(self) -> Iterator[Watchdog]:
        """Watches during the body."""
        with contextlib.suppress(OSError):  # without a file for stacks the run goes on
            self._stacks_path.parent.mkdir(exist_ok=True)
            self._stacks = self._stacks_path.open("w")
            faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        self._thread.start()
        try:
            with nullcontext() if self._exchange is None else self._exchange.running():
                yield self
        finally:
            self._ended.set()
            if self._verdict is None:  # else the thread goes on until the process group is gone
                self._thread.join(2 * POLL_SECONDS)

    def add_step(self, seconds: float) -> None:
        """Adds the duration of a finished step."""
        if self._first_step is None:
            self._first_step = seconds
        else:
            self._steps.append(seconds)

    def verdict(self, seconds: float) -> Verdict | None:
        """The verdict on the run, for which the caller, whose collective failed, waits so long."""
        if self._exchange is not None:
            self._exchange.ask()
        self._decided.wait(seconds)
        return self._verdict

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            views = self._views.read()
            self._record_blocked_call(views[self._rank])
            if self._exchange is not None:
                views = self._exchange.merge(views)
            limits = self._limits._replace(hang=max(self._limits.hang, LEAST_STEPS * self.median_step_seconds))
            if verdict := diagnose(views, limits, self._ranks_per_stage):
                self._end(verdict)
            self._warn_of_stall(views)
        self._close_stacks()

    def _record_blocked_call(self, own: RankView) -> None:
        """Records the collective of a library in which the main thread has waited for a while, or in which its device
        waits in a CUDA graph."""
        if own.slot.state in ("computing", "blocked") and own.idle_seconds > POLL_SECONDS:
            call = blocked_call(self._main_thread) or self._heartbeat.pending()
            self._heartbeat.set_blocked(call, own.slot.seconds)

    @property
    def median_step_seconds(self) -> float:
        """Median duration of the last steps. The first one, which compiles, counts until there is another; 0 before."""
        return statistics.median(self._steps) if self._steps else self._first_step or 0.0

    def _warn_of_stall(self, views: list[RankView]) -> None:
        """Warns once of each stall in a step that the adaptive limit finds, and writes this rank's stacks."""
        if not self._steps:
            return
        limit = max(LEAST_WARNING_SECONDS, WARNING_STEPS * self.median_step_seconds)
        verdict = diagnose(views, StallLimits(limit, float("inf")), self._ranks_per_stage)
        if verdict is None or verdict.exit_code != RankStalledError.exit_code:
            return
        stall = next(view.slot[:5] for view in views if view.slot.rank == verdict.ranks[0])
        if stall == self._warned:
            return
        self._warned = stall
        self._write_stacks(verdict.message)
        if self._rank == self._reporter(verdict):
            self._report.warn(f"{verdict.message}. Stacks of all ranks that run: {self._stacks_path.parent}")

    def _end(self, verdict: Verdict) -> None:
        """Ends this process with the verdict, unless its main thread leaves before."""
        own = self._views.seen[self._rank]
        if own.state in ("failed", "done") or not self._ends:
            return
        self._heartbeat.accuse(verdict.exit_code, verdict.ranks[0])
        self._verdict = verdict = verdict._replace(message=f"{verdict.message}. {self._remedy(verdict)}")
        self._write_stacks(verdict.message)
        reports = self._rank == self._reporter(verdict)
        if verdict.exit_code == RankFailedError.exit_code:
            faulthandler.dump_traceback_later(LATEST_SECONDS, exit=True, file=self._stacks or 2)
            self._decided.set()
            if self._leaves():
                return
        else:
            if reports:
                self._signal(verdict, STACKS_SIGNAL)
            time.sleep(2 * POLL_SECONDS)  # none leaves before all have read the verdict
        if reports:
            self._report.end(verdict)
            self._kill(verdict)
        self._decided.set()
        error = verdict.error()
        with contextlib.suppress(OSError):  # nobody may read it any more
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        self._heartbeat.end(str(error))
        os._exit(verdict.exit_code)

    def _leaves(self) -> bool:
        """Whether the main thread, whose collectives fail, leaves by itself: it has the time until the process group is
        gone, as NCCL's shutdown waits for kernels that wait for the rank that died."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            if self._ended.wait(POLL_SECONDS / 10) and not distributed():
                faulthandler.cancel_dump_traceback_later()
                return True
            time.sleep(POLL_SECONDS / 10)
        return False

    def _remedy(self, verdict: Verdict) -> str:
        if verdict.exit_code == RankFailedError.exit_code:
            return "Run the same command to continue from the newest checkpoint"
        return (
            f"Limits: train.hang_timeout_seconds = {self._limits.hang:g}, train.phase_timeout_seconds = "
            f"{self._limits.phase:g}; stacks of all ranks that run: {self._stacks_path.parent}; run the same command "
            "to continue from the newest checkpoint"
        )

    def _reporter(self, verdict: Verdict) -> int:
        """The rank that reports: the lowest one that is not named and is there, else the lowest named one."""
        others = [
            rank
            for rank, slot in self._views.seen.items()
            if rank not in verdict.ranks and slot.state not in ("absent", "done", "failed")
        ]
        return min(others or verdict.ranks)

    def _kill(self, verdict: Verdict) -> None:
        """Ends the processes of the named ranks: those that can leave by themselves have a second for it."""
        deadline = time.monotonic() + 2 * POLL_SECONDS
        slots = [self._views.seen[rank] for rank in verdict.ranks if rank != self._rank]
        while time.monotonic() < deadline:
            if all(process_state(slot.pid, slot.started).state != "running" for slot in slots):
                break
            time.sleep(POLL_SECONDS / 10)
        self._signal(verdict, signal.SIGKILL)

    def _signal(self, verdict: Verdict, number: int) -> None:
        """Sends a signal to the named ranks whose processes still exist, except this one."""
        for slot in (self._views.seen[rank] for rank in verdict.ranks if rank != self._rank):
            if slot.pid and process_state(slot.pid, slot.started).state != "dead":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(slot.pid, number)

    def _write_stacks(self, reason: str) -> None:
        if self._stacks is not None:
            with contextlib.suppress(OSError):
                self._stacks.write(f"rank {self._rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}\n")
                self._stacks.flush()
                faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _close_stacks(self) -> None:
        """Closes the file of stacks; removes it where it is empty, and the folder with the last one."""
        if self._stacks is None:
            return
        faulthandler.unregister(STACKS_SIGNAL)
        self._stacks.close()
        with contextlib.suppress(OSError):
            if not self._stacks_path.stat().st_size:
                self._stacks_path.unlink()
                self._stacks_path.parent.rmdir()
