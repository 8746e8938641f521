"""The clock of training steps, the same for ours and for a peer."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megalin.train.garbage_collection import without_long_collections


class Begun(NamedTuple):
    """A step that was started."""

    is_ready: bool
    """Whether it is done, too."""
    wait: Callable[[], float]
    """Waits for its loss."""
    end: torch.cuda.Event | None = None
    """Recorded on the device after all that the step starts there; None where it is done when its loss is ready."""


class Timing(NamedTuple):
    """Of steps one after the other on one batch."""

    median_seconds: float
    seconds: list[float]
    """Of the timed steps, each from the end of the one before to its own."""
    first_step_seconds: float
    """From `started` to the end of the first step: compilers, autotuning and start-up."""
    losses: list[float]
    """Of every step, those before the clock started included."""


def end_on(device: torch.device) -> torch.cuda.Event | None:
    """The end of what was started on the device up to now, as the device's own clock sees it: a host that starts the
    next step before it looks is late, by up to a step."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_steps(start: Callable[[int], Begun], *, warmup: int, steps: int, started: float) -> Timing:
    """Runs steps by `start(index)` and times the last `steps`. As in training, a step is started before the loss of the
    one before is waited for, unless that is ready; the first ends by itself.

    Args:
        warmup: steps before the clock starts, at least one.
    """
    assert warmup > 0, warmup
    steps_begun: list[Begun] = []
    ends: list[float] = []
    losses: list[float] = []

    def end() -> None:
        for step in steps_begun[len(losses) :]:
            losses.append(step.wait())
            ends.append(time.perf_counter())

    with without_long_collections() as freeze:
        for index in range(warmup + steps):
            begun = start(index)
            end()
            steps_begun.append(begun)
            if index == 0 or begun.is_ready:
                end()
            if index == 0:
                freeze()
        end()
    seconds = [_between(*of_two) for of_two in itertools.pairwise(zip(ends, steps_begun, strict=True))]
    timed = seconds[warmup - 1 :]
    return Timing(statistics.median(timed), timed, ends[0] - started, losses)


def _between(before: tuple[float, Begun], after: tuple[float, Begun]) -> float:
    (early, one), (late, other) = before, after
    if one.end is None or other.end is None:
        return late - early
    other.end.synchronize()
    return one.end.elapsed_time(other.end) / 1e3
