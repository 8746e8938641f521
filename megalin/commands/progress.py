"""Progress of a command on standard error: bars on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from megalin.terminal_output import terminal

Report = Callable[[str, int, int | None], None]
"""Called with the name of a piece of work, the number of its finished parts, and of all if it is known."""
_FIRST_LINE_SECONDS = 2.0
"""Time without a line where standard error is not a terminal."""
_LINE_SECONDS = 10.0
"""Least time between two lines there."""


@contextmanager
def progress_bars(*, shown: bool = True) -> Iterator[Report]:
    """Yields a function that moves the bars. Without a terminal it prints a line, at most every _LINE_SECONDS.

    Args:
        shown: False on ranks whose progress another rank shows.
    """
    if not shown or not sys.stderr.isatty():
        yield _lines() if shown else _silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining())
    bars = dict[str, TaskID]()
    with Progress(*columns, console=Console(file=terminal(stderr=True)), transient=True) as progress:

        def report(name: str, done: int, total: int | None) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], completed=done)

        yield report


def _silent(_name: str, _done: int, _total: int | None) -> None:
    """Shows nothing."""


def _lines(clock: Callable[[], float] = time.monotonic) -> Report:
    """A function that prints progress as lines, none in the first _FIRST_LINE_SECONDS."""
    next_line = clock() + _FIRST_LINE_SECONDS

    def report(name: str, done: int, total: int | None) -> None:
        nonlocal next_line
        if clock() >= next_line:
            next_line = clock() + _LINE_SECONDS
            print(f"{name}: {done}" + ("" if total is None else f" of {total}"), file=sys.stderr, flush=True)

    return report
