"""The clock of training steps, the same for ours and for a peer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Timing(NamedTuple):
    """Of steps one after the other on one batch."""

    median_seconds: float
    seconds: list[float]
    """Of the timed steps."""
    first_step_seconds: float
    """From `started` to the end of the first step: compilers, autotuning and start-up."""
    losses: list[float]
    """Of every step, those before the clock started included."""


def time_steps(step: Callable[[int], float], *, warmup: int, steps: int, started: float) -> Timing:
    """Runs `step(index)`, which returns its loss and so waits for the device, and times the last `steps`."""
    seconds, losses = [], []
    first_step_seconds = 0.0
    for index in range(warmup + steps):
        begin = time.perf_counter()
        losses.append(step(index))
        if index == 0:
            first_step_seconds = time.perf_counter() - started
        if index >= warmup:
            seconds.append(time.perf_counter() - begin)
    return Timing(statistics.median(seconds), seconds, first_step_seconds, losses)
