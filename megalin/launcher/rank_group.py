"""One start of all ranks: their processes and store, their output, and their end."""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Self

from megalin.errors import PreemptedError, RankFailedError
from megalin.launcher.outcome import describe_end, describe_place, grace_seconds, outcome
from megalin.launcher.output import RankOutput
from megalin.launcher.rank_process import Ending, ForkedProcess, RankProcess, read_available
from megalin.launcher.run_files import OUTPUT_NAME, RunFiles
from megalin.launcher.stall_watch import StallWatch
from megalin.parallel.diagnosis import StallLimits
from megalin.parallel.heartbeats import VARIABLE
from megalin.parallel.store_process import loopback_listener, serve_store, store_environment

_POLL_SECONDS = 0.1
_QUIET_SECONDS = 2.0
"""Time after a first signal without a line: most runs have saved by then."""


class End(NamedTuple):
    """End of a start of all ranks."""

    code: int
    message: str
    """Error message for people; empty if the ranks printed theirs, or there is none."""


class RankGroup:
    """The ranks of one start, children of this process; a context manager, at whose end none is left."""

    def __init__(self, run: Callable[[], int], world_size: int, files: RunFiles, limits: StallLimits) -> None:
        """Forks the process of the store and the ranks; to be called in the main thread, without others.

        Args:
            run: the command of a rank; its result is the exit code.
            files: the files of this start in the run folder.
            limits: longest times without progress of a rank.
        """
        self._files, self._output = files, RankOutput()
        with loopback_listener() as listener:
            common = store_environment(listener.getsockname()[1]) | {VARIABLE: str(files.heartbeats.path)}
            self._store = ForkedProcess(lambda: _serve(listener))
        self._ranks: list[RankProcess] = []
        for rank in range(world_size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            variables = {name: str(value) for name, value in place.items()} | common
            self._ranks.append(RankProcess(rank, variables, run))
        self._watch = StallWatch(files.heartbeats, limits, [rank.pid for rank in self._ranks])
        self._running = list(self._ranks)
        self._endings: list[Ending] = []
        self._deadline = float("inf")
        self._failure: RankFailedError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.end()
            rank.close()
        self._store.end()
        self._output.raw.close()

    def wait(self, signals: Sequence[str]) -> End:
        """Waits for the end of all ranks: by themselves, a while after one failed, or after a second signal.

        Args:
            signals: names of those that this process has received, which grow. The first is passed on as SIGTERM.
        """
        passed_on = warn_at = float("inf")
        while self._running:
            now = time.monotonic()
            self._read(now)
            self._collect(now)
            if len(signals) > 1:
                break
            if self._failure is None and (verdict := self._watch.check()) is not None:
                self._failure, self._deadline = verdict.error(), now
            # SIGTERM to one rank alone: in a step it makes all save, at the start it ends this rank.
            if passed_on == float("inf") and (signals or any(each.code == -signal.SIGTERM for each in self._endings)):
                passed_on, warn_at = now, now + _QUIET_SECONDS
                for number in ((signal.SIGINT,) if "SIGINT" in signals[:1] else ()) + (signal.SIGTERM,):
                    self._send(number)  # ranks that cannot save yet ignore Ctrl-C
            if now > warn_at and signals:
                warn_at = float("inf")
                print(f"{signals[0]}: waiting for the ranks to save; another one ends them at once", file=sys.stderr)
            if now > self._deadline:
                break
        self._send(signal.SIGKILL)
        for rank in self._running:
            rank.end()
            self._drain(rank, time.monotonic())
        self._output.show(time.monotonic(), rest=True)
        return self._end(signals)

    def _send(self, number: int) -> None:
        for rank in self._running:
            rank.send(number)

    def _read(self, now: float) -> None:
        """Reads the output that comes within the poll interval; shows the lines that are due."""
        pipes = {rank.shown: (rank, True) for rank in self._running}
        pipes |= {rank.raw: (rank, False) for rank in self._running}
        for pipe in select.select(list(pipes), [], [], _POLL_SECONDS)[0]:
            rank, shown = pipes[pipe]
            self._output.add(rank.rank, read_available(pipe), now, shown=shown)
        if self._files.check_begun():
            self._output.raw.open(self._files.folder / OUTPUT_NAME)
        self._output.show(now)

    def _drain(self, rank: RankProcess, now: float) -> None:
        for pipe, shown in ((rank.shown, True), (rank.raw, False)):
            while data := read_available(pipe):
                self._output.add(rank.rank, data, now, shown=shown)
        self._output.finish(rank.rank, now)

    def _collect(self, now: float) -> None:
        """Notes the ranks that have ended, and until when the others may run."""
        for rank in list(self._running):
            ending = rank.poll()
            if ending is not None:
                self._running.remove(rank)
                self._drain(rank, now)
                self._endings.append(ending)
                self._end_others_after(ending, now)
        if self._store.poll() is not None and self._failure is None:
            self._failure = RankFailedError("the process of the ranks' store died")
            self._deadline = min(self._deadline, now)

    def _end_others_after(self, ending: Ending, now: float) -> None:
        # Watchdogs kill a rank that has stalled before they leave themselves.
        accused = any(slot.verdict for slot in self._files.heartbeats.slots())
        self._deadline = min(self._deadline, now + grace_seconds(ending, accused=accused))
        if outcome(self._endings).culprit == ending:
            self._output.hide_missing_ranks()

    def _end(self, signals: Sequence[str]) -> End:
        if len(signals) > 1 and self._running:
            code = 128 + signal.Signals[signals[1]]
            return End(code, f"{signals[1]} again: the ranks were ended before they had saved")
        found = outcome(self._endings)
        if found.culprit is None and self._failure is not None and self._running:
            step = max(slot.step for slot in self._files.heartbeats.slots())
            self._files.record_error(step, f"{type(self._failure).__name__}: {self._failure}")
            return End(self._failure.exit_code, str(self._failure))
        if found.culprit is None:
            saved = found.code != PreemptedError.exit_code or any(each.code == found.code for each in self._endings)
            return End(found.code, "" if saved else f"{signals[0] if signals else 'SIGTERM'} before the first step")
        rank, code = found.culprit.rank, found.culprit.code
        if code > 1:
            return End(found.code, "")  # the rank has printed its error
        slot = self._files.heartbeats.slots()[rank]
        message = f"rank {rank} {describe_end(found.culprit)} {describe_place(slot)}"
        if code < 1 or rank > 0:  # rank 0 records its own exceptions
            name = "RankFailedError: " if found.code == RankFailedError.exit_code else ""
            self._files.record_error(slot.step, f"{name}{message}")
        output = self._output.raw.path
        return End(found.code, message + ("" if output is None else f"; output of all ranks: {output}"))


def _serve(listener: socket.socket) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ranks that save need the store
    serve_store(listener)
