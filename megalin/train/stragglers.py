"""Warning about a rank that is slower than the others, by the ranks' own time in each step.

In a synchronous run all ranks have the same step time: they wait for the slowest one. A rank's own time is that of a
step less the time in which it waits for others in collectives, so only the slow rank's grows.

On CPUs it is the host's time for the launch of the step. Time in which the thread could run and had no CPU does not
count: with more processes than CPUs the ranks take turns at being slow. On GPUs it is the time of the compute stream,
less its waits for collectives (`parallel.compute_waits`). A wait that is not measured makes a fast rank's own time
longer, never a slow rank's shorter: it can hide a slow rank, but names none.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WINDOW, DISREGARDED = 10, 1
"""A rank's own time is the shortest of so many steps, after so many that are shorter. Other processes only add to the
time of a step, so that a rank counts as slow where nine of ten steps are, not where a burst disturbs most of them."""
CONFIRMATION = 10
"""Steps in a row for which a rank must be slow: it is named 18 steps after it becomes slow."""
MOST_RATIO = 1.4
"""Ratio of a rank's own time to the ranks' median above which it is slow. Of an even number of ranks the lower one of
the two in the middle, so that of two ranks the slow one differs from it."""
LEAST_SECONDS = 20e-3
"""Difference from the median below which no rank is slow: on a busy host, a rank took 23 instead of 15 ms for 90 steps,
probably because of a neighbour of its CPU."""
PAUSE = 1000
"""Steps between two warnings."""


class OwnTime:
    """Measures on the host the own time of this rank's main thread from its creation on.

    It is the wall-clock time without waits for other ranks and for a CPU, at least the CPU time: a wait for a CPU may
    fall into a wait for another rank, and is then subtracted twice.

    Args:
        wait_seconds: waits for other ranks so far.
    """

    def __init__(self, wait_seconds: float) -> None:
        self._working, self._cpu = time.perf_counter() - _queue_seconds() - wait_seconds, time.thread_time()

    def seconds(self, wait_seconds: float) -> float:
        """The own time until now."""
        working = time.perf_counter() - _queue_seconds() - wait_seconds
        return max(working - self._working, time.thread_time() - self._cpu)


def _queue_seconds() -> float:
    """Time in which this thread could run and waited for a CPU, so far; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class SlowestRank(NamedTuple):
    """The rank with the longest own time in the last steps, or the group of ranks with that one."""

    rank: int
    ratio: float
    """Its own time over the median of the ranks or groups."""
    seconds: float
    """Its own time, a step."""
    median_seconds: float

    @property
    def is_slow(self) -> bool:
        """Whether it is a straggler, as far as these steps show."""
        return self.ratio > MOST_RATIO and self.seconds - self.median_seconds > LEAST_SECONDS


class StragglerMonitor:
    """Finds the slowest rank of the last steps, and reports it where it stays slow.

    Args:
        group_size: neighbouring ranks that wait for each other in collectives whose waits are not always measured.
            Where they are not, each has the own time of the slowest of them, so that only groups can be compared.
    """

    def __init__(self, group_size: int = 1) -> None:
        self._group_size = self._size = group_size
        self._steps: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._num_steps = self._next_report = 0
        self._slow_group, self._slow_steps = -1, 0
        self.slowest: SlowestRank | None = None
        """Of the last steps; None before there are 10, and in a run of one rank or group."""

    def add(self, own_seconds: Sequence[float], *, each: bool = False) -> str:
        """Adds the own time of each rank in a step; returns a message for people if a rank has been slow for 10 steps,
        at most every 1,000 steps.

        Args:
            each: the waits for all ranks were measured, also within groups.
        """
        size = 1 if each else self._group_size
        if size != self._size:
            self._size, self.slowest = size, None
            self._steps.clear()
        self._num_steps += 1
        self._steps.append(own_seconds)
        if len(own_seconds) <= size or len(self._steps) < WINDOW:
            return ""
        shortest = [sorted(times)[DISREGARDED] for times in zip(*self._steps, strict=True)]
        of_groups = [max(shortest[first : first + size]) for first in range(0, len(shortest), size)]
        middle = max(statistics.median_low(of_groups), 1e-9)
        rank = max(range(len(shortest)), key=shortest.__getitem__)
        self.slowest = found = SlowestRank(rank, shortest[rank] / middle, shortest[rank], middle)
        group = rank // size
        same = found.is_slow and group == self._slow_group
        self._slow_group, self._slow_steps = group, self._slow_steps + 1 if same else int(found.is_slow)
        if self._slow_steps < CONFIRMATION or self._num_steps < self._next_report:
            return ""
        self._next_report = self._num_steps + PAUSE
        first = group * size
        name = f"rank {rank}" if size == 1 else f"one of the ranks {first} to {first + size - 1}"
        return (
            f"{name} is slow: its own time in the last steps, without waits for other ranks, is "
            f"{found.seconds * 1e3:.1f} ms a step, {found.ratio:.1f} times the ranks' median of {middle * 1e3:.1f} ms; "
            "all ranks wait for it: look at the load, the clock and the temperature of its host and GPU"
        )
