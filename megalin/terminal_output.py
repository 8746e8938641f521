"""Standard output and error whose control characters are escaped: names from files must not steer a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megalin.errors import MegalinError

# C0 without tab, line feed and carriage return; DEL; C1, which some terminals read as escapes too.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    r"""Replaces control characters by their escapes, such as \x1b, except tabs and line ends."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class ClosedOutputError(BrokenPipeError):
    """Output without a reader: the process that read it has ended."""


@contextlib.contextmanager
def closed_output() -> Iterator[None]:
    """Raises ClosedOutputError where the body writes to standard output or error whose reader has ended."""
    try:
        yield
    except ClosedOutputError:
        raise
    except BrokenPipeError as error:
        raise ClosedOutputError(*error.args) from None


def flush_output() -> None:
    """Flushes standard output. Raises ClosedOutputError."""
    if sys.stdout is not None:
        with closed_output():
            sys.stdout.flush()


def discard_output() -> None:
    """Discards what is still to be written to standard output, so that no later flush fails."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file
        number, sink = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, number)
        os.close(sink)


class EscapedOutput:
    """A text stream that escapes control characters; everything else is the wrapped stream's.

    Attributes:
        raw: the wrapped stream, for a library that draws on a terminal and escapes the text that it gets.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Writes the text, escaped; returns its length."""
        with closed_output():
            self.raw.write(escape_controls(text))
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        with closed_output():
            self.raw.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each of the texts, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Context manager that escapes what the body prints and logs on standard output and error."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_escaped(stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _escaped(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, EscapedOutput) else EscapedOutput(stream)


def exit_code(run: Callable[[], int | None]) -> int:
    """Runs a tool, whose output is escaped, and returns its exit code, 0 for None; a MegalinError is printed and gives
    its own exit code."""
    with escaped_output():
        try:
            return run() or 0
        except MegalinError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code


def terminal(*, stderr: bool = False) -> Any:
    """Standard output or error for a console of `rich`: a terminal without the escaping, as colours are control
    characters."""
    stream = sys.stderr if stderr else sys.stdout
    return stream.raw if isinstance(stream, EscapedOutput) and stream.isatty() else stream
