"""Waits of a GPU's compute stream for other ranks, measured by pairs of CUDA events.

The host launches a step ahead of the GPU, so its clock does not show these waits. One event is recorded on the compute
stream right before it waits for the result of a collective, the other one right after it. A collective that overlaps
with computation counts only for the time in which the computation stands still. In a CUDA graph, whose events have only
the times of its last replay, an observer of the capture measures the waits, and their sum is added after each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_Pair = tuple[Any, Any]
"""Two events with timing, the earlier one first."""


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class OwnDuration(NamedTuple):
    """Own time of a rank in a step: own = sum of intervals - sum of waits within them."""

    intervals: list[_Pair]
    waits: list[_Pair]
    free: list[Any]
    """Receives the events after they were read."""
    replayed: list[Tensor]
    """Sums of the waits within replays of CUDA graphs, [1] int64, ns, in host memory."""

    def seconds(self) -> float:
        """The own time, s, without a wait of the host. To be called once, after the device has reached the last event:
        the events serve later steps."""
        own = sum(start.elapsed_time(end) for start, end in self.intervals)
        own -= sum(start.elapsed_time(end) for start, end in self.waits)
        for pair in (*self.intervals, *self.waits):
            self.free.extend(pair)
        return own / 1e3 - sum(float(waited) for waited in self.replayed) / 1e9


class ComputeWaits:
    """Measures each step's own time: the time of the compute stream less its waits for other ranks.

    A step lasts from the `end_step` of the one before to its own, without the time between `leave` and `enter`, in
    which the host reads samples, evaluates or saves. Outside of these intervals no wait is measured.

    Args:
        cuda_stream: the compute stream.
        make_event: creates an event with timing; events are reused.
        captured_on: the CUDA stream on which forwards and backwards run that are captured.
    """

    def __init__(
        self, cuda_stream: Any, make_event: Callable[[], Any] = _timed_event, *, captured_on: Any = None
    ) -> None:
        self.cuda_stream = cuda_stream
        self.waiting_cuda_streams = (cuda_stream, captured_on)
        """CUDA streams whose waits count."""
        self._make_event = make_event
        self._observer: Callable[[], AbstractContextManager[None]] | None = None
        self._replayed: list[Tensor] = []
        self._free: list[Any] = []
        self._intervals: list[_Pair] = []
        self._waits: list[_Pair] = []
        self._entered: Any = None

    def enter(self) -> None:
        """Starts an interval, unless one has started."""
        if self._entered is None:
            self._entered = self._mark()

    def leave(self) -> None:
        """Ends the interval, if there is one."""
        if self._entered is not None:
            self._intervals.append((self._entered, self._mark()))
            self._entered = None

    def end_step(self) -> OwnDuration:
        """Ends a step, and starts the next one's first interval."""
        self.leave()
        duration = OwnDuration(self._intervals, self._waits, self._free, self._replayed)
        self._intervals, self._waits, self._replayed = [], [], []
        self.enter()
        return duration

    @contextmanager
    def measured(self, cuda_stream: Any = None) -> Iterator[None]:
        """Measures the wait of a CUDA stream, by default the compute stream, that the body launches."""
        if self._observer is not None:
            with self._observer():
                yield
            return
        if self._entered is None:
            yield
            return
        before = self._mark(cuda_stream)
        yield
        self._waits.append((before, self._mark(cuda_stream)))

    def measured_on_current(self) -> AbstractContextManager[None]:
        """Measures the wait of the current CUDA stream that the body launches."""
        return self.measured(torch.cuda.current_stream())

    @contextmanager
    def observed_by(self, observer: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Measures the waits of the body, which is captured, by another observer."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def add_replay(self, waited: Tensor) -> None:
        """Adds the sum of the waits within a replay, as `OwnDuration.replayed`."""
        self._replayed.append(waited)

    def _mark(self, cuda_stream: Any = None) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record(self.cuda_stream if cuda_stream is None else cuda_stream)
        return event


class _CollectiveEnd(torch.cuda.Event):
    """Event after a collective, which measures the compute stream's wait for it."""

    waits: ComputeWaits

    def wait(self, cuda_stream: Any = None, /) -> None:
        """Makes a CUDA stream wait for the collective."""
        if cuda_stream is None or cuda_stream not in self.waits.waiting_cuda_streams:
            super().wait(cuda_stream)
            return
        with self.waits.measured(cuda_stream):
            super().wait(cuda_stream)


class _CollectiveStream(torch.cuda.Stream):
    """A CUDA stream of collectives, with events that measure the compute stream's waits."""

    waits: ComputeWaits

    def record_event(self, event: Any = None) -> Any:
        """Records `event`, or a new one."""
        if event is None:
            event = _CollectiveEnd()
            event.waits = self.waits
        return super().record_event(event)


def measuring_cuda_stream(cuda_stream: torch.cuda.Stream, waits: ComputeWaits) -> torch.cuda.Stream:
    """The same CUDA stream, as an object whose new events measure the compute stream's waits for them."""
    found = _CollectiveStream(
        stream_id=cuda_stream.stream_id,
        device_index=cuda_stream.device_index,
        device_type=cuda_stream.device_type,
    )
    found.waits = waits
    return found
