"""Own times of ranks from events on a stream whose clock the tests set."""

from __future__ import annotations

import pytest

from megalin.parallel.compute_waits import ComputeWaits


class Stream:
    """A stream that works until `time`, s."""

    time = 0.0


class Event:
    """An event with timing, as torch's."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.time = 0.0

    def record(self, stream: Stream) -> None:
        self.time = stream.time

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


@pytest.fixture
def stream() -> Stream:
    Event.made = 0
    return Stream()


def run_step(waits: ComputeWaits, stream: Stream, *, work: float, wait: float, update: float = 0.0) -> float:
    """A step of three parts of work, each followed by a wait; returns the own time until its end."""
    waits.enter()
    for _ in range(3):
        stream.time += work
        with waits.measured():
            stream.time += wait
    duration = waits.end_step()
    stream.time += update
    waits.leave()
    return duration.seconds()


def test_own_time_is_that_of_the_step_without_its_waits(stream):
    waits = ComputeWaits(stream, Event)
    assert run_step(waits, stream, work=0.1, wait=0.3) == pytest.approx(0.3)
    assert run_step(waits, stream, work=0.2, wait=0.0) == pytest.approx(0.6)


def test_update_counts_for_the_next_step_and_the_time_between_launches_for_none(stream):
    waits = ComputeWaits(stream, Event)
    run_step(waits, stream, work=0.1, wait=0.0, update=0.05)
    stream.time += 7.0  # samples, an evaluation
    with waits.measured():
        stream.time += 7.0
    assert run_step(waits, stream, work=0.1, wait=0.2) == pytest.approx(0.35)


def test_second_start_of_a_step_does_not_shorten_it(stream):
    waits = ComputeWaits(stream, Event)
    waits.enter()
    stream.time += 0.1
    assert run_step(waits, stream, work=0.1, wait=0.2) == pytest.approx(0.4)


def test_events_are_reused_by_later_steps(stream):
    waits = ComputeWaits(stream, Event)
    run_step(waits, stream, work=0.1, wait=0.1)
    run_step(waits, stream, work=0.1, wait=0.1)
    made = Event.made
    for _ in range(5):
        run_step(waits, stream, work=0.1, wait=0.1)
    assert Event.made == made
