"""Record of the collectives in a step's CUDA graph, which the device writes in every replay.

A replay launches nothing that the host could record. So kernels in the graph mark in host memory where a CUDA stream
begins and ends to wait for each collective, and measure the compute stream's waits. The watchdog reads the marks: a
device that waits in a collective waits for other ranks, and one that has begun none is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megalin.ops.step_record import DeviceMarks
from megalin.parallel.compute_waits import ComputeWaits
from megalin.parallel.heartbeats import Heartbeat

CAPACITY = 2**16
"""Collectives of a graph that have marks; later ones have none. 32 micro-batches of 48 blocks with tensor and context
parallelism have about half as many."""


class Marks(Protocol):
    """Interface of `DeviceMarks`."""

    words: Tensor

    def reset(self) -> None: ...
    def begin_replay(self) -> None: ...
    def mark(self, place: int, *, waits: bool, ends: bool) -> None: ...
    def wait(self, *, ends: bool) -> None: ...
    def waited(self) -> Tensor: ...


class GraphCollective(NamedTuple):
    """A collective in a graph."""

    op: str
    axis: str
    shape: tuple[int, ...]


class StepRecord:
    """Observer of the collectives that are captured, and reader of the marks of their replays.

    Args:
        marks: of at least two words.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks, self._capacity = marks, len(marks.words) // 2
        begun, ended = marks.words.numpy()[: 2 * self._capacity].reshape(2, -1)
        self._begun, self._ended = begun, ended
        self._collectives: list[GraphCollective] = []

    @classmethod
    def on(cls, device: torch.device) -> StepRecord:
        """The record of graphs on a GPU."""
        return cls(DeviceMarks(device, 2 * CAPACITY))

    def reset(self) -> None:
        """Clears the record, whose graph will not be replayed again; waits for the device."""
        self._collectives = []
        self._marks.reset()

    @contextmanager
    def recording(self, heartbeat: Heartbeat, waits: ComputeWaits | None) -> Iterator[None]:
        """Records the collectives and waits of the body, which is captured, after `reset`."""
        self._marks.begin_replay()
        heartbeat.observer = self
        try:
            with nullcontext() if waits is None else waits.observed_by(self.waiting):
                yield
        finally:
            heartbeat.observer = None

    @contextmanager
    def collective(self, op: str, axis: str, shape: Sequence[int], *, waits: bool = False) -> Iterator[None]:
        """Marks a collective around the body, in which the current CUDA stream launches it and waits for it; with
        `waits` that is the compute stream, whose wait is measured."""
        index = len(self._collectives)
        self._collectives.append(GraphCollective(op, axis, tuple(shape)))
        if index >= self._capacity:
            yield
            return
        self._marks.mark(index, waits=waits, ends=False)
        yield
        self._marks.mark(self._capacity + index, waits=waits, ends=True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures the current CUDA stream's wait that the body launches."""
        self._marks.wait(ends=False)
        yield
        self._marks.wait(ends=True)

    def waited(self) -> Tensor:
        """Sum of the waits of the last replay, [1] int64, ns; valid once the current CUDA stream has reached this."""
        return self._marks.waited()

    def pending(self) -> str:
        """The first collective in which this rank's device waits in a replay; empty where it waits in none."""
        collectives = self._collectives
        count = min(len(collectives), self._capacity)
        found = np.flatnonzero(self._begun[:count] > self._ended[:count])
        if not len(found):
            return ""
        op, axis, shape = collectives[first := int(found[0])]
        return (
            f"{op} {list(shape)} on {axis}, collective {first + 1} of {len(collectives)} in the CUDA graph of its step"
        )
