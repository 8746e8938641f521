"""Slow ranks: named once their own time stays above that of the others, and never because of single steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalin.parallel.process_group import process_group
from megalin.train import loop as loops
from megalin.train.step import LaunchedStep
from megalin.train.stragglers import StragglerMonitor
from tests.model_runs import CPU, STEPS, late_results, train_here, write_config


def first_report(steps: list[list[float]]) -> tuple[int, str]:
    """The number of the first step with a message, counted from 1, and the message; (0, "") without."""
    monitor = StragglerMonitor()
    for number, own_seconds in enumerate(steps, 1):
        if text := monitor.add(own_seconds):
            return number, text
    return 0, ""


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_rank_that_becomes_slow_is_named_within_20_steps(world_size):
    clean = [[0.1] * world_size] * 30
    slow = [0.1] * (world_size - 1) + [0.2]
    number, text = first_report(clean + [slow] * 20)
    assert 30 + 10 <= number <= 30 + 20
    assert text.startswith(f"rank {world_size - 1} is slow: ")
    assert "200.0 ms a step, 2.0 times the ranks' median of 100.0 ms" in text


def test_rank_that_becomes_slow_on_a_busy_host_is_named_within_20_steps():
    steps = disturbed(400)
    for own_seconds in steps[30:]:
        own_seconds[2] *= 2.5
    number, text = first_report(steps)
    assert 30 + 10 <= number <= 30 + 20
    assert text.startswith("rank 2 is slow: ")


def test_slowest_rank_is_a_metric_before_it_is_reported():
    monitor = StragglerMonitor()
    for _ in range(9):
        monitor.add([0.1, 0.12, 0.1])
    assert monitor.slowest is None
    monitor.add([0.1, 0.12, 0.1])
    assert monitor.slowest is not None
    assert monitor.slowest[0] == 1
    assert monitor.slowest.ratio == pytest.approx(1.2)
    assert not monitor.slowest.is_slow


def test_message_is_not_repeated_for_1000_steps():
    monitor = StragglerMonitor()
    texts = [monitor.add([0.1, 0.3]) for _ in range(1100)]
    assert len([text for text in texts if text]) == 2


def test_group_whose_ranks_wait_for_each_other_is_named():
    monitor = StragglerMonitor(group_size=2)
    steps = [[0.1, 0.1, 0.2, 0.199 + 0.002 * (number % 2), 0.1, 0.1] for number in range(20)]
    texts = [text for own_seconds in steps if (text := monitor.add(own_seconds))]
    assert len(texts) == 1
    assert texts[0].startswith("one of the ranks 2 to 3 is slow: ")
    assert "2.0 times the ranks' median of 100.0 ms" in texts[0]


def test_only_group_is_compared_with_nothing():
    monitor = StragglerMonitor(group_size=2)
    assert not any(monitor.add([0.1, 0.3]) for _ in range(100))
    assert monitor.slowest is None


def test_ranks_of_a_group_are_compared_where_every_wait_is_measured():
    monitor = StragglerMonitor(group_size=2)
    steps = [monitor.add([0.1, 0.3], each=number >= 20) for number in range(60)]
    assert [number for number, text in enumerate(steps) if text] == [20 + 18]
    assert steps[38].startswith("rank 1 is slow: ")
    monitor.add([0.1, 0.3])
    assert monitor.slowest is None


def disturbed(steps: int) -> list[list[float]]:
    """Ranks of a busy host: noise of a fifth, and one step in eight three to ten times as long on one rank."""
    draw = random.Random(0)
    made = [[0.02 * draw.uniform(0.9, 1.1) for _ in range(4)] for _ in range(steps)]
    for own_seconds in made:
        if draw.random() < 0.125:
            own_seconds[draw.randrange(4)] *= draw.uniform(3, 10)
    return made


def bursts(steps: int) -> list[list[float]]:
    """Two ranks of a busy host: once in 50 steps, another process disturbs one rank for 20 steps. Three of five of them
    are 1.2 to 3 times as long."""
    draw = random.Random(0)
    made = [[0.1 * draw.uniform(0.85, 1.15) for _ in range(2)] for _ in range(steps)]
    for first in range(0, steps, 50):
        rank = draw.randrange(2)
        for own_seconds in made[first : first + 20]:
            own_seconds[rank] *= draw.uniform(1.2, 3) if draw.random() < 0.6 else 1.0
    return made


@pytest.mark.parametrize(
    "steps",
    [
        disturbed(3000),
        bursts(3000),
        [[0.1, 0.135]] * 100,  # below the ratio
        [[0.001, 0.0025]] * 100,  # tiny steps
        [[0.015, 0.023], [0.016, 0.026]] * 50,  # a busy neighbour of a rank's CPU, as recorded
        ([[0.1, 0.1]] * 10 + [[0.1, 0.2]] * 10) * 10,  # slow for ten steps at a time
        [[0.1]] * 100,  # alone
    ],
    ids=["a busy host", "bursts", "below the ratio", "tiny steps", "a busy neighbour", "for a while", "alone"],
)
def test_no_rank_is_named(steps):
    assert first_report(steps) == (0, "")


def test_own_time_of_each_step_that_the_device_measured_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counted: list[Sequence[float]] = []
    wait: Any = LaunchedStep.wait
    monkeypatch.setattr(loops, "SYNCHRONOUS_DEVICES", frozenset())
    monkeypatch.setattr(LaunchedStep, "wait", lambda step: wait(step)._replace(own_seconds=step._step / 100))
    monkeypatch.setattr(StragglerMonitor, "add", lambda _, own_seconds, each: counted.append(own_seconds) or "")
    with process_group(CPU), late_results():
        train_here(write_config(tmp_path), tmp_path / "run", "checkpoint.every_steps=5")
    numbers = [round(100 * own_seconds[0]) for own_seconds in counted]
    # The results of two steps are read together where the later one is saved; then the later one counts. The first step
    # compiles, and that of the last step is never sent.
    assert numbers == [number for number in range(2, STEPS - 1) if number not in (4, 9)]
