"""The clock of training steps, the same for ours and for a peer."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Begun(NamedTuple):
    """A step that was started."""

    known: bool
    """Whether it is done, too."""
    wait: Callable[[], float]
    """Waits for its loss."""


class Timing(NamedTuple):
    """Of steps one after the other on one batch."""

    median_seconds: float
    seconds: list[float]
    """Of the timed steps, each from the loss before to its own."""
    first_step_seconds: float
    """From `started` to the end of the first step: compilers, autotuning and start-up."""
    losses: list[float]
    """Of every step, those before the clock started included."""


def time_steps(start: Callable[[int], Begun], *, warmup: int, steps: int, started: float) -> Timing:
    """Runs steps by `start(index)` and times the last `steps`. As in training, a step is started before the loss of the
    one before is waited for, unless that is known; the first ends by itself."""
    ends, losses = [time.perf_counter()], []
    running: list[Begun] = []

    def end() -> None:
        while running:
            losses.append(running.pop().wait())
            ends.append(time.perf_counter())

    for index in range(warmup + steps):
        begun = start(index)
        end()
        running.append(begun)
        if index == 0 or begun.known:
            end()
    end()
    seconds = [after - before for before, after in itertools.pairwise(ends)][warmup:]
    return Timing(statistics.median(seconds), seconds, ends[1] - started, losses)
