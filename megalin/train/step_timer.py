"""Duration of training steps, measured on the device that computes them."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from megalin.parallel.compute_waits import ComputeWaits, OwnDuration


class _Timestamp:
    """A point in time: a CUDA event on the current stream of a GPU, on other devices the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def seconds_until(self, later: _Timestamp) -> float:
        """The time from this point to `later`, which the device has reached."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        return self._event.elapsed_time(later._event) / 1e3


class StepDuration(NamedTuple):
    """Duration of a step, readable once the device has reached the step's end."""

    intervals: tuple[tuple[_Timestamp, _Timestamp], ...]
    """Start and end of each period that counts; pauses lie between them."""
    own: OwnDuration | None = None
    """The rank's own time, on a GPU where waits are measured."""

    def seconds(self) -> float:
        """The sum of the intervals, s. The host does not wait for the device."""
        return sum(start.seconds_until(end) for start, end in self.intervals)

    def own_seconds(self) -> float:
        """The time without waits for other ranks and between two launches, s; 0 where it is not measured. To be called
        once."""
        return 0.0 if self.own is None else self.own.seconds()


class StepTimer:
    """Measures each step from the end of the previous step to its own end, without pauses between them.

    A step includes the wait for its data and all else that the host does between two steps, so tokens over seconds is
    the rate of the run. A pause lasts until the next step starts. On a GPU all times are CUDA events on the compute
    stream, which must be the current one: recording them takes microseconds of the host and never waits.

    Attributes:
        waits: measures this rank's own time in each step; None: it is not measured.
        measures_every_wait: whether no wait for another rank is left out, so that ranks of a block can be compared.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: _Timestamp | None = None
        self._intervals: list[tuple[_Timestamp, _Timestamp]] = []
        self.waits: ComputeWaits | None = None
        self.measures_every_wait = False

    def start(self) -> None:
        """Marks the start of a step; only the first one, and one after a pause, is measured from here."""
        if self._start is None:
            self._start = _Timestamp(self._device)
        if self.waits is not None:
            self.waits.enter()

    def end(self) -> StepDuration:
        """Marks the end of a started step, which is the start of the next one."""
        assert self._start is not None
        now = _Timestamp(self._device)
        own = None if self.waits is None else self.waits.end_step()
        duration = StepDuration((*self._intervals, (self._start, now)), own)
        self._start, self._intervals = now, []
        return duration

    def leave(self) -> None:
        """Marks the end of a step's launch: until the next start, time is not this rank's own."""
        if self.waits is not None:
            self.waits.leave()

    def pause(self) -> None:
        """Excludes everything until the next step starts from that step's duration.

        No step may be between its `start` and `end`.
        """
        if self._start is not None:
            self._intervals.append((self._start, _Timestamp(self._device)))
            self._start = None
