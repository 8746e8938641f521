"""Clock of training steps, the same for our model and for baselines."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megalin.train.garbage_collection import without_long_collections


class StartedStep(NamedTuple):
    """A step that has been launched."""

    is_ready: bool
    """True where it has also finished."""
    wait: Callable[[], float]
    """Waits for its loss and returns it."""
    end: torch.cuda.Event | None = None
    """Recorded on the device after all kernels of the step; None where the step ends with its loss."""


class Timing(NamedTuple):
    """Times and losses of consecutive steps on one batch."""

    median_seconds: float
    seconds: list[float]
    """Of the timed steps, each from the end of the previous step to its own."""
    first_step_seconds: float
    """From `started` to the end of the first step: compilation, autotuning and start-up."""
    losses: list[float]
    """Of every step, warmup included."""


def end_on(device: torch.device) -> torch.cuda.Event | None:
    """Records a timing event after all kernels launched so far; None on a CPU. The host's own clock would be late by up
    to a step, since it launches the next step before it waits."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_steps(start: Callable[[int], StartedStep], *, warmup: int, steps: int, started: float) -> Timing:
    """Runs steps by `start(index)` and times the last `steps`. As in training, a step is launched before the previous
    step's loss is read, unless that is ready; the first step is waited for.

    Args:
        warmup: untimed steps, at least one.
    """
    assert warmup > 0, warmup
    started_steps: list[StartedStep] = []
    ends: list[float] = []
    losses: list[float] = []

    def end() -> None:
        for step in started_steps[len(losses) :]:
            losses.append(step.wait())
            ends.append(time.perf_counter())

    with without_long_collections() as freeze:
        for index in range(warmup + steps):
            step = start(index)
            end()
            started_steps.append(step)
            if index == 0 or step.is_ready:
                end()
            if index == 0:
                freeze()
        end()
    seconds = [_seconds_between(*pair) for pair in itertools.pairwise(zip(ends, started_steps, strict=True))]
    timed = seconds[warmup - 1 :]
    return Timing(statistics.median(timed), timed, ends[0] - started, losses)


def _seconds_between(before: tuple[float, StartedStep], after: tuple[float, StartedStep]) -> float:
    (early, one), (late, other) = before, after
    if one.end is None or other.end is None:
        return late - early
    other.end.synchronize()
    return one.end.elapsed_time(other.end) / 1e3
