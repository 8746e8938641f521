"""The clock of training steps, the same for ours and for a peer."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

Wait = Callable[[], float]
"""Waits for the loss of a step that was started."""


class Timing(NamedTuple):
    """Of steps one after the other on one batch."""

    median_seconds: float
    seconds: list[float]
    """Of the timed steps, each from the loss before to its own."""
    first_step_seconds: float
    """From `started` to the end of the first step: compilers, autotuning and start-up."""
    losses: list[float]
    """Of every step, those before the clock started included."""


def time_steps(start: Callable[[int], Wait], *, warmup: int, steps: int, started: float) -> Timing:
    """Runs steps by `start(index)` and times the last `steps`. As in training, a step is started before the loss of the
    one before is waited for; but for the first, which ends by itself."""
    ends, losses = [time.perf_counter()], []
    running: Wait | None = None

    def end() -> None:
        if running is not None:
            losses.append(running())
            ends.append(time.perf_counter())

    for index in range(warmup + steps):
        begun = start(index)
        end()
        running = begun
        if index == 0:
            end()
            running = None
    end()
    seconds = [after - before for before, after in itertools.pairwise(ends)][warmup:]
    return Timing(statistics.median(seconds), seconds, ends[1] - started, losses)
