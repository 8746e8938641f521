"""Lines on standard error for work that takes more than two seconds, such as loading the weights of a large model."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_SECONDS = 2.0
"""Seconds without a line."""
NEXT_SECONDS = 10.0
"""Seconds between two lines."""


@contextmanager
def slow_work(name: str, *, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """Prints the time that the body has taken, and the done fraction if it is known: after FIRST_SECONDS, then every
    NEXT_SECONDS, and at the end if a line was printed. Shorter work prints nothing.

    Args:
        name: of the work, as "loading runs/mine/checkpoints/step-00000100".
        shown: False on ranks whose progress another rank prints.

    Yields:
        A function that takes the done fraction.
    """
    done, finished, lines = 0.0, threading.Event(), 0
    start = time.monotonic()

    def report(fraction: float) -> None:
        nonlocal done
        done = fraction

    def print_lines() -> None:
        nonlocal lines
        while not finished.wait(NEXT_SECONDS if lines else FIRST_SECONDS):
            lines += 1
            part = f", {done:.0%} done" if done else ""
            print(f"{name}: {time.monotonic() - start:.0f} s{part}", file=sys.stderr, flush=True)

    if not shown:
        yield report
        return
    thread = threading.Thread(target=print_lines, name="slow_work", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        finished.set()
        thread.join(NEXT_SECONDS)  # a pipe that nobody reads may hold it
        if lines:
            print(f"{name}: ended after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
