"""Step times and rates, independent of late results and of evaluations and checkpoints between steps."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import megalin.train.engine as engines
import megalin.train.loop as loops
import megalin.train.saves as saves
import megalin.train.step as steps
from megalin.parallel.process_group import process_group
from megalin.train.step_timer import StepTimer
from tests.model_runs import CPU, late_results, train_here, write_config

GRADIENTS, UPDATE, EVALUATION, SAVE = 1.0, 0.2, 7.0, 5.0
"""Simulated seconds of a step's forward and backward passes, of its update, of an evaluation and of a checkpoint."""
LAUNCH = 0.01
"""Simulated seconds that a fast host takes to launch each of them."""


class Machine:
    """Clocks of a host and of a device, asynchronous or synchronous."""

    def __init__(self, *, asynchronous: bool, launch: float = LAUNCH) -> None:
        self.asynchronous, self._launch = asynchronous, launch
        self.host = self.device = 0.0

    def launch(self, seconds: float) -> None:
        """Queues work of `seconds` on the device."""
        self.host += self._launch
        self.device = max(self.host, self.device) + seconds
        if not self.asynchronous:
            self.host = self.device

    def wait(self, until: float) -> None:
        """Makes the host wait until the device's clock reads `until`."""
        self.host = max(self.host, until)

    def perf_counter(self) -> float:
        self.host += 1e-6
        return self.host

    def event(self, *, enable_timing: bool) -> Event:
        """Stand-in for `torch.cuda.Event`."""
        assert enable_timing
        return Event(self)

    def scalars(self, values: Tensor) -> Scalars:
        """Stand-in for `AsyncScalars`."""
        return Scalars(self, values)


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def record(self) -> None:
        self.time = max(self._machine.host, self._machine.device)

    def elapsed_time(self, later: Event) -> float:
        assert later.time <= self._machine.host, "the device has not reached the event"
        return 1e3 * (later.time - self.time)


class Scalars:
    def __init__(self, machine: Machine, values: Tensor) -> None:
        self._machine, self._values, self._ready = machine, values, machine.device

    def read(self) -> Tensor:
        self._machine.wait(self._ready)
        return self._values


def _launching(machine: Machine, seconds: float, function: Callable[..., Any], *, synchronous: bool = False) -> Any:
    """`function`, preceded by simulated work of `seconds`."""

    def launched(*args: Any, **options: Any) -> Any:
        machine.launch(seconds)
        if synchronous:
            machine.wait(machine.device)
        return function(*args, **options)

    return launched


class Case(NamedTuple):
    asynchronous: bool
    launch: float
    step_seconds: float


CASES = {
    "known_at_once": Case(False, LAUNCH, GRADIENTS + UPDATE),
    "one_step_late": Case(True, LAUNCH, GRADIENTS + UPDATE),
    "one_step_late_slow_host": Case(True, 1.5, 3.0),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(name="_machine")
def _simulated(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(asynchronous=case.asynchronous, launch=case.launch)
    monkeypatch.setattr(time, "perf_counter", machine.perf_counter)
    for module, name, seconds, synchronous in (
        (steps, "accumulate_gradients", GRADIENTS, False),
        (steps, "step_or_skip", UPDATE, False),
        (loops, "evaluate", EVALUATION, True),
        (saves, "save_now", SAVE, True),
    ):
        function = _launching(machine, seconds, getattr(module, name), synchronous=synchronous)
        monkeypatch.setattr(module, name, function)
    if machine.asynchronous:
        monkeypatch.setattr(torch.cuda, "Event", machine.event)
        monkeypatch.setattr(engines, "StepTimer", lambda _: StepTimer(torch.device("cuda")))
        monkeypatch.setattr(steps, "AsyncScalars", machine.scalars)


@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize("saved", ["checkpoint.every_steps=2", "checkpoint.every_steps=3"])
def test_no_rate_is_raised_by_evaluations_and_checkpoints(case, tmp_path, saved):
    config = write_config(tmp_path)
    with process_group(CPU), late_results() if case.asynchronous else nullcontext():
        train_here(config, tmp_path / "run", "train.evaluate_every_steps=2", "train.evaluate_batches=1", saved)
    rates = _of_run(tmp_path / "run", "tokens_per_second")
    assert len(rates) == 12
    assert max(rates) < 1.5 * statistics.median(rates)
    seconds = _of_run(tmp_path / "run", "step_seconds")
    assert seconds[1:] == pytest.approx([case.step_seconds] * 11, rel=0.1)


def _of_run(folder: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_wait_for_data_counts(monkeypatch):
    machine = Machine(asynchronous=False)
    monkeypatch.setattr(time, "perf_counter", machine.perf_counter)
    timer = StepTimer(CPU)
    machine.host += 100.0
    timer.start()
    machine.launch(2.0)
    assert timer.end().seconds() == pytest.approx(2.0, abs=2 * LAUNCH)
    machine.host += 3.0
    timer.start()
    machine.launch(2.0)
    assert timer.end().seconds() == pytest.approx(5.0, abs=2 * LAUNCH)
    machine.host += 3.0
    timer.pause()
    machine.host += 50.0
    timer.start()
    machine.launch(2.0)
    assert timer.end().seconds() == pytest.approx(5.0, abs=2 * LAUNCH)


def test_a_pause_before_the_first_step_counts_for_none(monkeypatch):
    machine = Machine(asynchronous=False)
    monkeypatch.setattr(time, "perf_counter", machine.perf_counter)
    timer = StepTimer(CPU)
    timer.pause()
    machine.host += 50.0
    timer.start()
    machine.launch(2.0)
    assert timer.end().seconds() == pytest.approx(2.0, abs=2 * LAUNCH)


def test_device_time_is_measured_from_end_to_end(monkeypatch):
    machine = Machine(asynchronous=True)
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    timer = StepTimer(torch.device("cuda"))
    timer.start()
    machine.launch(1.0)
    first = timer.end()
    machine.launch(0.5)
    timer.start()
    machine.launch(1.0)
    second = timer.end()
    assert machine.host == 3 * LAUNCH  # the host never waited
    machine.wait(machine.device)
    assert (first.seconds(), second.seconds()) == pytest.approx((1.0 + LAUNCH, 1.5))
