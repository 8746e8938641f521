"""Resuming: bit-exact on the same mesh, the same samples on another, and no step lost or repeated after a kill."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalin.errors import PreemptedError
from megalin.parallel.agreement import rank
from megalin.train.engine import FullyShardedEngine
from megalin.train.jsonl import read_records
from megalin.train.metrics import Metrics
from megalin.train.step import PendingStep
from tests.model_runs import (
    DROPOUT,
    STEPS,
    checkpoint_tensors,
    late_results,
    ledger,
    losses,
    metrics,
    steps_saved,
    train_here,
    write_config,
)
from tests.numerics import assert_close
from tests.ranks import RankFailedError, run_ranks

STOP = 5
MESHES = {
    "single": (1, []),
    "tp2": (2, ["parallel.tp=2"]),
    "dp2_accumulating": (
        2,
        ["train.micro_batch_size=1", "train.recompute=true", "data.workers=3", "data.read_ahead_steps=2"],
    ),
}
BACKGROUND = "checkpoint.background=true"
RESUMED = ("single", "dp2_accumulating")
"""Meshes on which make test stops and resumes a run; on tp2 it resumes the run whose second rank is killed."""
SLOW_MESHES = {
    "single_accumulating": (1, ["train.micro_batch_size=1", "data.workers=3", "data.read_ahead_steps=2"]),
    "cp3": (3, ["parallel.cp=3"]),
    "cp2_dp2": (4, ["parallel.cp=2", "parallel.shard=2"]),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("resume"), model=DROPOUT, checkpoint={"every_steps": 2})


def _runs(config: Path, calls: list[tuple[Path, list[str]]]) -> None:
    """Trains several runs one after the other on the same ranks; each starts from its folder, as a new process does."""
    for folder, overrides in calls:
        train_here(config, folder, *overrides)


@pytest.fixture(scope="module")
def whole_runs(with_slow: bool, config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of uninterrupted runs of 12 steps, by mesh, each next to `stopped`, which stopped after 5 and resumed, on
    several ranks with saves in the background: all of them with the slow tests, else those of RESUMED."""
    folders = {}
    for name, (world_size, overrides) in (MESHES | SLOW_MESHES if with_slow else MESHES).items():
        whole = folders[name] = tmp_path_factory.mktemp(name) / "whole"
        stopped = whole.with_name("stopped")
        saved = overrides if name == "single" else [*overrides, BACKGROUND]
        stop = [*saved, f"train.stop_after_steps={STOP}"]
        resumed = [(stopped, stop), (stopped, saved)] if with_slow or name in RESUMED else []
        run_ranks(world_size, _runs, config, [(whole, [*overrides, f"checkpoint.every_steps={STEPS}"]), *resumed])
    return folders


def without_evaluation(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without evaluations: a run also evaluates where it stops."""
    return [{name: value for name, value in line.items() if name != "evaluation_loss"} for line in lines]


def assert_same_end(folder: Path, expected: Path) -> None:
    """Asserts metrics equal to the last bit, and equal weights, moments and step counts."""
    assert without_evaluation(metrics(folder)) == without_evaluation(metrics(expected))
    assert metrics(folder)[-1] == metrics(expected)[-1]
    actual, wanted = checkpoint_tensors(folder), checkpoint_tensors(expected)
    assert actual.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(actual[name], wanted[name])] == []


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=[pytest.mark.slow] * (mesh not in RESUMED)) for mesh in MESHES | SLOW_MESHES],
)
def test_resumed_run_is_bit_equal_on_the_same_mesh(whole_runs, mesh):
    stopped = whole_runs[mesh].with_name("stopped")
    assert steps_saved(stopped) == [2, 4, 5, 6, 8, 10, 12]
    assert_same_end(stopped, whole_runs[mesh])


def test_loss_falls_and_every_mesh_has_the_same_curve(whole_runs):
    expected = losses(whole_runs["single"])
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 1.5
    for folder in whole_runs.values():
        assert losses(folder) == pytest.approx(expected, rel=2e-5)
        last, wanted = metrics(folder)[-1], metrics(whole_runs["single"])[-1]
        assert last["evaluation_loss"] == pytest.approx(wanted["evaluation_loss"], rel=2e-5)
        assert_close(checkpoint_tensors(folder), checkpoint_tensors(whole_runs["single"]), 1e-3)


def test_every_mesh_and_every_resumed_run_reads_the_same_tokens_in_each_step(whole_runs):
    expected = ledger(whole_runs["single"])
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    assert len({line["digest"] for line in expected}) == STEPS
    for folder in whole_runs.values():
        assert ledger(folder) == expected
        if (stopped := folder.with_name("stopped")).exists():
            assert ledger(stopped) == expected


@pytest.mark.parametrize(
    "path",
    [
        [
            (2, [["parallel.tp=2"], ["data.workers=4", "train.micro_batch_size=1"], ["parallel.pp=2"]]),
            (3, [["parallel.cp=3"]]),
        ],
        pytest.param([(4, [["train.micro_batch_size=1"]]), (2, [["parallel.cp=2"]])], marks=pytest.mark.slow),
    ],
    ids=["tp2 dp2 pp2 cp3", "dp4 cp2"],
)
def test_resume_on_other_meshes_goes_on_with_the_same_samples(config, whole_runs, tmp_path, path):
    folder, step = tmp_path / "run", 0
    for world_size, meshes in path:
        parts = []
        for mesh in meshes:
            step += 2
            parts.append((folder, [*mesh, f"train.stop_after_steps={step}", BACKGROUND, "checkpoint.every_steps=1"]))
        run_ranks(world_size, _runs, config, parts)
    run_ranks(1, _runs, config, [(folder, [])])
    expected = metrics(whole_runs["single"])
    assert [line["label_tokens"] for line in metrics(folder)] == [line["label_tokens"] for line in expected]
    assert losses(folder) == pytest.approx([line["loss"] for line in expected], rel=2e-5)
    assert ledger(folder) == ledger(whole_runs["single"])


SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _train_with_signals(config: Path, folder: Path, overrides: list[str], steps: list[int], late: bool) -> list[str]:
    """Trains and resumes; rank 1 receives a signal during each of `steps`, which ends the run. Returns the errors."""
    messages, take = [], FullyShardedEngine.step
    handlers = [signal.getsignal(number) for number in SIGNALS]

    def signalled(engine: FullyShardedEngine, *args: Any, step: int, **options: Any) -> PendingStep:
        started = take(engine, *args, step=step, **options)
        if step in steps and rank() == 1:
            os.kill(os.getpid(), SIGNALS[steps.index(step)])
            # A second one, as the cluster manager and the launcher, or the terminal and the launcher, both send it.
            os.kill(os.getpid(), SIGNALS[steps.index(step)])
        return started

    with patch.object(FullyShardedEngine, "step", signalled), late_results() if late else nullcontext():
        for _ in steps:
            with pytest.raises(PreemptedError) as raised:
                train_here(config, folder, *overrides)
            messages.append(str(raised.value))
        train_here(config, folder, *overrides)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    return messages


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
def test_run_that_a_signal_ends_on_one_rank_goes_on_bit_equal(config, whole_runs, tmp_path, late):
    mesh, folder = "dp2_accumulating", tmp_path / "run"
    world_size, overrides = MESHES[mesh]
    overrides = [*overrides, BACKGROUND] if late else overrides
    steps = [4, 7]  # the first is a step that is saved anyway, and is saved once
    for messages in run_ranks(world_size, _train_with_signals, config, folder, overrides, steps, late):
        assert messages == [
            f"{number.name} after {step} of {STEPS} steps, all of them saved in {folder / 'checkpoints'}; run the same "
            "command to continue"
            for number, step in zip(SIGNALS, steps, strict=True)
        ]
    events = list(read_records(folder / "incidents.jsonl"))
    assert [event["kind"] for event in events if event["kind"] != "warning"] == [
        *("started", "stopped", "resumed", "stopped", "resumed"),
    ]
    assert steps_saved(folder) == [2, 4, 6, 7, 8, 10, 12]
    assert_same_end(folder, whole_runs[mesh])
    assert ledger(folder) == ledger(whole_runs[mesh])


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train_until_killed(config: Path, folder: Path, overrides: list[str], event: int) -> int:
    """Trains, and sends this process SIGKILL right before event number `event`; returns the number of events of a run.

    Events are changes of the run's files: metrics lines, syncs, renames.
    """
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == event:
                _die()
            return call(*args)

        return wrapper

    os.fsync, os.rename, os.replace = counted(os.fsync), counted(os.rename), counted(os.replace)
    Metrics.write = counted(Metrics.write)  # type: ignore[method-assign]
    train_here(config, folder, *overrides)
    return count


@pytest.fixture(scope="module")
def num_events(config: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    return run_ranks(1, _train_until_killed, config, tmp_path_factory.mktemp("events") / "run", [], 0)[0]


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        (0, [BACKGROUND]),
        *(pytest.param(seed, [BACKGROUND], marks=pytest.mark.slow) for seed in range(1, 6)),
        *(pytest.param(seed, [], marks=pytest.mark.slow) for seed in range(6, 10)),
    ],
)
def test_run_killed_at_random_goes_on_as_if_nothing_had_happened(
    config, whole_runs, num_events, tmp_path, seed, overrides
):
    event = random.Random(seed).randint(num_events // 8, num_events)
    folder = tmp_path / "run"
    with pytest.raises(RankFailedError, match="rank 0 died: -9"):
        run_ranks(1, _train_until_killed, config, folder, overrides, event)
    assert len(losses(folder)) <= STEPS
    run_ranks(1, _runs, config, [(folder, overrides)])
    assert_same_end(folder, whole_runs["single"])
    assert ledger(folder) == ledger(whole_runs["single"])
    assert '"taken over", "message": "from pid ' in (folder / "incidents.jsonl").read_text()
    assert [path.name for path in (folder / "checkpoints").glob(".tmp-*")] == []


def test_run_whose_second_rank_is_killed_goes_on(config, whole_runs, tmp_path):
    folder = tmp_path / "run"
    # Either the death or the failed collective of the other rank is noticed first.
    with pytest.raises(RankFailedError, match=r"rank 1 died: -9|rank 0:"):
        run_ranks(2, _kill_rank_one, config, folder, ["parallel.tp=2", BACKGROUND])
    assert len(losses(folder)) < STEPS
    run_ranks(2, _runs, config, [(folder, ["parallel.tp=2"])])
    assert_same_end(folder, whole_runs["tp2"])


def _kill_rank_one(config: Path, folder: Path, overrides: list[str]) -> None:
    if torch.distributed.get_rank() == 1:
        _train_until_killed(config, folder, overrides, 9)
    train_here(config, folder, *overrides)


def test_finished_run_has_nothing_left_to_do(config, whole_runs):
    folder = whole_runs["single"]
    (folder / "loss.png").write_bytes(b"with the entropy of the last evaluation, which is not repeated")
    before = [(folder / name).read_bytes() for name in ("metrics.jsonl", "loss.png")]
    assert run_ranks(1, _again, config, folder) == [(STEPS, None)]
    assert [(folder / name).read_bytes() for name in ("metrics.jsonl", "loss.png")] == before


def _again(config: Path, folder: Path) -> tuple[int, float | None]:
    return train_here(config, folder, loss_curve=True)[:2]
