"""The record of a CUDA graph's collectives, written by a stand-in for the device, and the diagnosis from it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megalin.parallel import collectives
from megalin.parallel.collectives import Axis
from megalin.parallel.compute_waits import ComputeWaits
from megalin.parallel.diagnosis import RankView, StallLimits, diagnose
from megalin.parallel.heartbeats import Heartbeat, RankSlot
from megalin.parallel.process_state import ProcessState
from megalin.parallel.step_record import StepRecord
from tests.parallel.test_compute_waits import Event, Stream


class FakeDevice:
    """A device whose graph is the list of what was captured; replays stop where they hang."""

    def __init__(self, count: int = 16) -> None:
        self.words = torch.zeros(count, dtype=torch.int64)
        self.nodes: list[Any] = []
        self.replays, self.nanoseconds, self.sum, self._start = 0, 0, 0, 0

    def reset(self) -> None:
        self.nodes, self.replays = [], 0
        self.words.zero_()

    def begin_replay(self) -> None:
        self.nodes.append(self._begin)

    def mark(self, place: int, *, waits: bool, ends: bool) -> None:
        self.nodes.append(lambda: self.words.__setitem__(place, self.replays))
        if waits:
            self.wait(ends=ends)

    def wait(self, *, ends: bool) -> None:
        self.nodes.append(self._end_wait if ends else self._start_wait)

    def work(self, nanoseconds: int) -> None:
        self.nodes.append(lambda: setattr(self, "nanoseconds", self.nanoseconds + nanoseconds))

    def waited(self) -> torch.Tensor:
        return torch.tensor([self.sum])

    def replay(self, nodes: int | None = None) -> None:
        """Runs the graph, or its first nodes."""
        for node in self.nodes[:nodes]:
            node()

    def _begin(self) -> None:
        self.replays, self.sum = self.replays + 1, 0

    def _start_wait(self) -> None:
        self._start = self.nanoseconds

    def _end_wait(self) -> None:
        self.sum += self.nanoseconds - self._start


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def heartbeat(monkeypatch) -> Heartbeat:
    found = Heartbeat()
    monkeypatch.setattr(collectives, "current", lambda: found)
    return found


def capture(record: StepRecord, heartbeat: Heartbeat) -> None:
    """Two collectives, the second one begun before the first has ended: on another CUDA stream."""
    record.reset()
    with record.recording(heartbeat, None):
        assert heartbeat.observer is record
        with record.collective("all_reduce", "tp", (2, 3)), record.collective("all_gather of weights", "shard", (5,)):
            pass
    assert heartbeat.observer is None


def test_the_first_collective_that_has_not_ended_is_pending(device, heartbeat):
    record = StepRecord(device)
    capture(record, heartbeat)
    assert len(device.nodes) == 5  # the replay's begin, and two marks each
    first = "all_reduce [2, 3] on tp, collective 1 of 2 in the CUDA graph of its step"
    for _ in range(3):
        before = device.replays
        for nodes, pending in {0: "", 1: "", 2: first, 3: first, 4: first, 5: ""}.items():
            device.replays = before
            device.replay(nodes)
            assert record.pending() == pending, nodes
    device.replay(2)
    record.reset()
    assert record.pending() == ""


def test_collectives_beyond_the_marks_are_counted(heartbeat):
    device = FakeDevice(count=2)
    record = StepRecord(device)
    capture(record, heartbeat)
    device.replay(2)
    assert "collective 1 of 2" in record.pending()
    device.replay()
    assert record.pending() == ""


def test_waits_within_a_replay_are_no_own_time(device, heartbeat):
    stream, record = Stream(), StepRecord(device)
    waits = ComputeWaits(stream, Event)
    record.reset()
    with record.recording(heartbeat, waits):
        device.work(100_000_000)
        with waits.measured():
            device.work(300_000_000)
        with waits.measured(stream):
            device.work(50_000_000)
    for _ in range(2):
        waits.enter()
        device.replay()
        stream.time += 0.45
        waits.add_replay(record.waited())
        with waits.measured():  # outside of the graph
            stream.time += 0.2
        stream.time += 0.01
        assert waits.end_step().seconds() == pytest.approx(0.11)


def test_the_wait_for_a_captured_collective_is_marked_and_measured_once(device, heartbeat, monkeypatch):
    def wait(x: torch.Tensor) -> torch.Tensor:
        device.work(1000)
        return x

    pending = collectives.functional.AsyncCollectiveTensor
    monkeypatch.setattr(collectives, "SYNCHRONOUS_DEVICES", frozenset())
    monkeypatch.setattr(collectives.functional, "all_reduce", lambda x, *_: pending(x + 1))
    monkeypatch.setattr(collectives.functional, "wait_tensor", wait)
    record, axis, x = StepRecord(device), Axis("tp", 2), torch.ones(4, 6)
    heartbeat.measure_wait = record.waiting  # which would count the wait twice
    record.reset()
    with record.recording(heartbeat, None):
        first = collectives.all_reduce(x, axis)
        parts = first.view(2, 12).chunk(2)
        before = len(device.nodes)
        assert before == 1  # a device that computes until it needs the result waits for nobody
        assert torch.equal(parts[1] * 2, torch.full((1, 12), 4.0))
        marks = len(device.nodes)
        assert first.sum() == 48
        assert torch.equal(collectives.wait_tensor(collectives.all_reduce(x, axis)), x + 1)
    device.replay(marks)
    assert (device.sum, record.pending()) == (1000, "")
    device.replay(before + 1)
    assert record.pending() == "all_reduce [4, 6] on tp, collective 1 of 2 in the CUDA graph of its step"
    device.replay()
    assert (device.sum % 1000, record.pending()) == (0, "")


def view(rank: int, state: Any, note: str, step: int = 7) -> RankView:
    slot = RankSlot(rank, 100 + rank, "step", step, 50, time.monotonic(), state, 1)
    return RankView(slot, 20.0, ProcessState("running"), None, note)


def test_of_ranks_whose_devices_hang_the_one_that_waits_for_no_other_is_named(device, heartbeat):
    """Rank 1's device waits in a collective of the graph; that of rank 0, which computes, has begun none."""
    records = [StepRecord(device), StepRecord(other := FakeDevice())]
    for record in records:
        capture(record, heartbeat)
    device.replay(1)
    other.replay(2)
    notes = [record.pending() for record in records]
    verdict = diagnose(
        [view(rank, "blocked" if note else "computing", note) for rank, note in enumerate(notes)],
        StallLimits(hang=10, phase=100),
    )
    assert verdict is not None
    assert verdict.ranks == (0,)
    assert "rank 0 stalled: no progress for 20 s in step 7" in verdict.message
    assert "rank 1 waits in all_reduce [2, 3] on tp, collective 1 of 2 in the CUDA graph" in verdict.message


def test_ranks_with_different_graphs_all_wait(device, heartbeat):
    notes = ["all_gather [1] on tp, collective 3 of 9", "all_reduce [1] on cp, collective 4 of 9"]
    views = [view(rank, "blocked", note) for rank, note in enumerate(notes)]
    verdict = diagnose(views, StallLimits(hang=10, phase=100))
    assert verdict is not None
    assert verdict.ranks == (0, 1)
    assert all(note in verdict.message for note in notes)
