"""Faults that a run shows: long waits for data, samples of a bad step, missing memory, durations, Ctrl-C."""

import itertools
import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megalin import __main__ as command_line
from megalin.data.loader import Loader
from megalin.errors import HostMemoryError, NumericError
from megalin.parallel.agreement import rank
from megalin.train.data_wait import WINDOW, DataWaitMonitor
from megalin.train.host_memory import report_host_memory
from megalin.train.slow_saves import SaveMonitor
from megalin.train.step_data import describe_samples
from tests.model_runs import train_here, write_config
from tests.ranks import run_ranks


def _messages(waits: list[tuple[float, int]], step_seconds: float) -> list[tuple[int, str]]:
    monitor = DataWaitMonitor()
    found = [monitor.add(wait_seconds=wait, rank=number, step_seconds=step_seconds) for wait, number in waits]
    return [(place, message) for place, message in enumerate(found, start=1) if message]


def test_long_waits_are_warned_about_once_in_a_thousand_steps():
    ((first, message), (second, _)) = _messages([(0.04, place % 4 and 3) for place in range(1100)], 0.1)
    assert (first, second) == (WINDOW + 1, WINDOW + 1 + 1000)
    assert message.startswith(
        f"the last {WINDOW} steps waited for data for 40% of their time, longest on rank 3; raise"
    )


@pytest.mark.parametrize(
    ("waits", "step_seconds"),
    [
        ([(9.0, 0)] + [(0.004, 0)] * 50, 0.1),  # the first step, and 4 %
        ([(0.0009, 0)] * 50, 0.001),  # short steps
        ([(0.05, 0)] * WINDOW, 0.1),  # too few steps
    ],
)
def test_short_waits_are_not_warned_about(waits, step_seconds):
    assert _messages(waits, step_seconds) == []


def test_slow_saves_are_warned_about_once_in_twenty_saves():
    monitor = SaveMonitor()
    found = [monitor.add(started=10 * save, ended=10 * save + 4) for save in range(1, 25)]
    assert [place for place, message in enumerate(found, start=1) if message] == [3, 23]
    assert found[2].startswith("the last 2 saves took 4.0 s each, 40% of the time; raise checkpoint.every_steps")


@pytest.mark.parametrize(("interval", "seconds"), [(10.0, 0.9), (1.0, 0.8)])
def test_saves_of_a_tenth_of_the_time_or_less_than_a_second_are_not_warned_about(interval, seconds):
    monitor = SaveMonitor()
    for save in range(1, 25):
        assert monitor.add(started=interval * save, ended=interval * save + seconds) == ""


def test_samples_of_a_step_are_those_that_each_rank_loads():
    order = SimpleNamespace(samples=lambda positions: positions * 7 % 64)
    config = SimpleNamespace(train=SimpleNamespace(global_batch_size=12, micro_batch_size=2))
    data = SimpleNamespace(order=order)
    described = describe_samples(config, data, SimpleNamespace(samples=SimpleNamespace(size=3)), 2)
    for number, text in enumerate(described.split("; ")):
        loader = Loader(None, order, global_batch_size=12, micro_batch_size=2, dp_rank=number, dp_size=3)
        ids = order.samples(loader._offsets + 12).flatten().tolist()
        assert text == f"{number}: {', '.join(map(str, ids))}"
        loader.close()
    many = SimpleNamespace(samples=SimpleNamespace(size=10))
    config.train.global_batch_size = 400
    assert re.search(
        r"0: (\d+, ){15}\d+ and 24 more; .*; 7: .*; and those of 2 more ranks$", describe_samples(config, data, many, 1)
    )


def test_process_without_memory_names_its_resident_memory_and_limits():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = 64 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        for allocate in (lambda: torch.empty(1 << 40, dtype=torch.uint8), lambda: np.empty(1 << 40, np.uint8)):
            with (
                pytest.raises(
                    HostMemoryError,
                    match=r"rank 0 is out of host memory: \d+\.\d\d GiB resident, limits: address space \(ulimit -v\) "
                    r"64\.00 GiB, host \d+\.\d\d GiB",
                ),
                report_host_memory(),
            ):
                allocate()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    with pytest.raises(RuntimeError, match="another error"), report_host_memory():
        raise RuntimeError("another error")


@pytest.mark.parametrize(("own_rank", "lines"), [("0", 1), ("1", 0)])
def test_interrupted_command_ends_in_one_line(monkeypatch, capsys, own_rank, lines):
    monkeypatch.setenv("RANK", own_rank)
    with patch.object(command_line, "_command", side_effect=KeyboardInterrupt):
        assert command_line.main([]) == 130
    shown = capsys.readouterr().err
    assert shown.count("\n") == shown.count("--resume the work on a corpus") == lines


def _slow_reader(config: Path, folder: Path) -> str:
    """A run on a clock by which rank 1 waits for 5 seconds a step, and whose loss is NaN in a later process."""
    clock = itertools.count(0, 5 * rank())
    with patch("megalin.train.step_data.time", SimpleNamespace(perf_counter=lambda: next(clock))):
        train_here(config, folder, "train.stop_after_steps=4")
    try:
        train_here(config, folder, "optimizer.lr=1e30", "optimizer.max_grad_norm=1e30")
    except NumericError as error:
        return str(error)
    return ""


def test_run_shows_waits_durations_and_samples(tmp_path):
    config, folder = (
        write_config(tmp_path, train={"evaluate_every_steps": 2}, checkpoint={"every_steps": 2}),
        tmp_path / "run",
    )
    first, second = run_ranks(2, _slow_reader, config, folder)
    assert first == second
    assert re.search(
        r"is not finite; .*\. Samples of step \d, by data-parallel rank: 0: \d+, \d+; 1: \d+, \d+$", first
    ), first
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][:4]
    assert [line["data_wait_rank"] for line in lines] == [1] * 4
    assert [line["data_wait_seconds"] for line in lines] == [5] * 4
    assert ["evaluation_seconds" in line for line in lines] == [False, True, False, True]
    assert ["save_seconds" in line for line in lines] == [False, False, True, False]
