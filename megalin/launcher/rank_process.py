"""A rank as a forked child of the launcher: its variables, its end with its parent, and the pipes of its output."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TextIO

from megalin.errors import MegalinError, RankFailedError
from megalin.launcher.parent_death import end_with_parent
from megalin.launcher.signals import SIGNALS
from megalin.terminal_output import EscapedOutput

_CHUNK_BYTES = 1 << 16


class Ending(NamedTuple):
    """The end of a rank's process."""

    rank: int
    code: int
    """Exit code; -N after signal N."""
    finished: bool
    """Whether its command returned, rather than that something within it ended the process."""


class ForkedProcess:
    """A child of this process, forked from its main thread, that dies with it.

    Attributes:
        pid: its process id.
    """

    def __init__(self, run: Callable[[], int]) -> None:
        """Forks; the child exits with the result of `run`, with SIGTERM's default effect and without Ctrl-C's."""
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with _blocked_signals():
            self.pid = os.fork()
            if self.pid == 0:
                _run_child(run, parent)
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send(self, number: int) -> None:
        """Sends a signal, unless the process was seen to have ended."""
        if self._code is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kills the process and waits for its end."""
        if self.poll() is None:
            self.send(signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)


class RankProcess:
    """A started rank.

    Attributes:
        rank: its number.
        shown, raw: read ends of the pipes of Python's standard error, and of descriptor 2, which the C++ and CUDA
            libraries write.
    """

    def __init__(self, rank: int, environment: Mapping[str, str], run: Callable[[], int]) -> None:
        """Forks the rank.

        Args:
            environment: variables of the rank, set before `run`.
            run: the command; its result is the exit code.
        """
        self.rank = rank
        (self.shown, shown), (self.raw, raw), (self._finished, finished) = os.pipe(), os.pipe(), os.pipe()

        def child() -> int:
            os.environ.update(environment)
            terminal = os.dup(2) if rank == 0 else None
            os.dup2(raw, 2)
            faulthandler.enable(2)
            sys.stderr = _standard_error(shown, terminal)
            code = _exit_code(run)
            if code == 0:
                os.write(finished, b"1")
            return code

        self._process = ForkedProcess(child)
        for descriptor in (shown, raw, finished):
            os.close(descriptor)
        for descriptor in (self.shown, self.raw, self._finished):
            os.set_blocking(descriptor, False)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> Ending | None:
        """The end of the rank; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return Ending(self.rank, code, finished=bool(read_available(self._finished)))

    def send(self, number: int) -> None:
        """Sends a signal, unless the rank has ended."""
        self._process.send(number)

    def end(self) -> None:
        """Kills the rank, if it still runs, and waits for its end."""
        self._process.end()

    def close(self) -> None:
        """Closes the pipes."""
        for descriptor in (self.shown, self.raw, self._finished):
            os.close(descriptor)


def read_available(descriptor: int) -> bytes:
    """The bytes that a pipe without blocking holds now, at most 64 KiB; empty at its end too."""
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, _CHUNK_BYTES)
    return b""


class _Recorded:
    """A terminal whose text is written into a second file too."""

    def __init__(self, terminal: TextIO, record: TextIO) -> None:
        self._terminal, self._record = terminal, record

    def write(self, text: str) -> int:
        """Writes the text into both; returns its length."""
        self._record.write(text)
        self._terminal.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def _standard_error(pipe: int, terminal: int | None) -> EscapedOutput:
    """Python's standard error of a rank: the pipe to the launcher, and the descriptor `terminal`, so that a live view
    there knows of it."""
    record = os.fdopen(pipe, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    if terminal is None:
        return EscapedOutput(record, best_effort=True)
    shown = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace")
    return EscapedOutput(_Recorded(shown, record), best_effort=True)


def _exit_code(run: Callable[[], int]) -> int:
    """The result of `run`, or the exit code of its MegalinError, which is printed."""
    try:
        return run()
    except MegalinError as error:
        line = error.line()
        if isinstance(error, RankFailedError):
            os.write(2, f"{line}\n".encode())  # the launcher shows it, unless it knows why that rank has ended
        else:
            print(line, file=sys.stderr)
        return error.exit_code


def _run_child(run: Callable[[], int], parent: int) -> NoReturn:
    code = 1
    try:
        end_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all processes of the launcher
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() == parent:
            code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:  # an error goes no further: this is a copy of the launcher's stack
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
