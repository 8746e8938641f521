"""Standard output and error whose control characters are escaped: names from files must not steer a terminal."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megalin.errors import MegalinError, StorageError

# C0 without tab, line feed and carriage return; DEL; C1, which some terminals read as escapes too.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_log = logging.getLogger(__name__)


def escape_controls(text: str) -> str:
    r"""Replaces control characters by their escapes, such as \x1b, except tabs and line ends."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class OutputError(OSError):
    """Output that cannot be written, as to a file on a full disk."""


class ClosedOutputError(OutputError):
    """Output without a reader: the process that read it has ended."""


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Raises OutputError where the body cannot write to standard output or error, ClosedOutputError without a
    reader."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        kind = ClosedOutputError if error.errno == errno.EPIPE else OutputError
        raise kind(error.errno, error.strerror) from None


def finish_output() -> None:
    """Flushes standard output and error at the end of a command. What cannot be written is discarded, so that no later
    flush fails. Raises OutputError, unless the stream is written with best effort."""
    streams: tuple[Any, Any] = sys.stderr, sys.stdout
    for stream in streams:
        try:
            with output_errors():
                stream.raw.flush()
        except OutputError as error:
            _discard(stream)
            stream.lose(error)


def _discard(stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
        number, sink = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, number)
        os.close(sink)


def open_standard_files() -> None:
    """Opens the null device in place of closed standard input, output and error: else the next file that is opened
    takes their place, and libraries write into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


class _Closed(io.TextIOBase):
    """A standard stream that was closed when the process started."""

    def write(self, text: str) -> int:
        """Raises OSError."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class EscapedOutput:
    """A text stream that escapes control characters; everything else is the wrapped stream's.

    Attributes:
        raw: the wrapped stream, for a library that draws on a terminal and escapes the text that it gets.
        best_effort: whether text that cannot be written is dropped, so that a full disk or a closed terminal ends no
            work. The first loss on standard output is logged.
    """

    def __init__(self, raw: Any, *, best_effort: bool = False) -> None:
        self.raw, self.best_effort = raw, best_effort
        self._lost = False

    def write(self, text: str) -> int:
        """Writes the text, escaped; returns its length."""
        self._attempt(lambda: self.raw.write(escape_controls(text)))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        self._attempt(self.raw.flush)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each of the texts, escaped."""
        for line in lines:
            self.write(line)

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            with output_errors():
                write()
        except OutputError as error:
            self.lose(error)

    def lose(self, error: OutputError) -> None:
        """Raises the error of a write, unless the stream is written with best effort."""
        if not self.best_effort:
            raise error
        if self is sys.stdout and not self._lost:
            self._lost = True
            _log.warning("standard output cannot be written (%s); the command goes on without it", error.strerror)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Context manager that escapes what the body prints and logs on standard output and error. Whatever is lost on
    standard error ends nothing."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _escaped(sys.stdout), _escaped(sys.stderr, best_effort=True)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _escaped(stream: Any, *, best_effort: bool = False) -> Any:
    if isinstance(stream, EscapedOutput):
        return stream
    return EscapedOutput(_Closed() if stream is None else stream, best_effort=best_effort)


def set_best_effort() -> None:
    """Makes standard output drop what cannot be written, for a command whose result is files. Call it within
    `escaped_output`."""
    assert isinstance(sys.stdout, EscapedOutput), sys.stdout
    sys.stdout.best_effort = True


def exit_code(run: Callable[[], int | None]) -> int:
    """Runs a tool, whose output is escaped, and returns its exit code, 0 for None; a MegalinError is printed and gives
    its own exit code, and output that cannot be written that of StorageError."""
    with escaped_output():
        try:
            return run() or 0
        except ClosedOutputError:
            raise
        except OutputError as error:
            print(f"error: {describe_lost(error)}", file=sys.stderr)
            return StorageError.exit_code
        except MegalinError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code


def describe_lost(error: OutputError) -> str:
    """The error of a command whose result is what it prints."""
    return f"standard output cannot be written: {error.strerror}; free space, or send the output to another place"


def terminal(*, stderr: bool = False) -> Any:
    """Standard output or error for a console of `rich`: a terminal without the escaping, as colours are control
    characters."""
    stream = sys.stderr if stderr else sys.stdout
    return stream.raw if isinstance(stream, EscapedOutput) and stream.isatty() else stream
