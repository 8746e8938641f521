"""Rollbacks after a spike: an independent run without the window's batches, resumption, limits, and what is written."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalin.checkpoint.manifest import STATE_FILE, step_directory
from megalin.data.loader import Loader, StepBatches
from megalin.errors import CheckpointError, ConfigError, NumericError, PreemptedError
from megalin.train import spikes
from megalin.train.config import load_run_config
from megalin.train.engine import FullyShardedEngine
from megalin.train.rollback import is_scheduled
from megalin.train.spikes import SpikeGuard
from megalin.train.step_data import StepData, StepReader
from megalin.train.train_state import TrainState
from tests.model_runs import (
    CPU,
    DROPOUT,
    checkpoint_tensors,
    late_results,
    ledger,
    losses,
    metrics,
    model_table,
    steps_saved,
    train_here,
    write_config,
)
from tests.ranks import run_ranks

STEPS, SPIKE = 10, 8
EARLY = 5
"""A spike before the first checkpoint."""
RESTORED = 6
"""The checkpoint before the spike."""
LEFT_OUT = SPIKE - RESTORED
"""Batches between the two."""
ROLLBACK = "train.on_spike=rollback"


@contextmanager
def spikes_in(*batches: int, crash_at: int = 0, device: torch.device = CPU) -> Iterator[None]:
    """Makes batches of the sample order spikes: the guard sees their losses 10 higher. The first read of the batch
    `crash_at` after the first spike kills the run."""
    read, judge = StepReader.read, SpikeGuard.judge
    is_spike = torch.zeros((), device=device)  # a tensor, so that a CUDA graph reads it at each replay
    was_spike = False

    def reading(reader: StepReader, batch: int, **options: Any) -> StepData:
        nonlocal was_spike
        if was_spike and batch == crash_at:
            raise KeyboardInterrupt
        is_spike.fill_(batch in batches)
        was_spike |= batch in batches
        return read(reader, batch, **options)

    def judging(guard: SpikeGuard, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        return judge(guard, loss + 10.0 * is_spike, norm)

    with (
        patch.object(spikes, "WARM_UP", 3),
        patch.object(StepReader, "read", reading),
        patch.object(SpikeGuard, "judge", judging),
        late_results(),
    ):
        yield


@contextmanager
def without_the_window() -> Iterator[None]:
    """Loaders that leave out the batches between the checkpoint and the spike."""
    step = Loader.step

    def shifted(loader: Loader[Any], number: int) -> StepBatches[Any]:
        return step(loader, number if number < RESTORED else number + LEFT_OUT)

    with patch.object(Loader, "step", shifted), late_results():
        yield


@contextmanager
def preempted_before(batch: int) -> Iterator[None]:
    """Sends SIGTERM before a batch of the sample order is read, so that the steps before it are saved."""
    read = StepReader.read

    def reading(reader: StepReader, number: int, **options: Any) -> StepData:
        if number == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(reader, number, **options)

    with patch.object(StepReader, "read", reading), suppress(PreemptedError):
        yield


def _preempted(config: Path, root: Path) -> None:
    """Runs that are stopped between a checkpoint and a spike, of which one is kept; "early" before the first one."""
    options = [ROLLBACK, "checkpoint.keep_latest=1"]
    with spikes_in(SPIKE), preempted_before(SPIKE):
        train_here(config, root / "preempted", *options)
    assert steps_saved(root / "preempted") == [RESTORED, SPIKE - 1]
    with spikes_in(SPIKE, crash_at=SPIKE + 2), suppress(KeyboardInterrupt):
        train_here(config, root / "preempted", *options)
    assert steps_saved(root / "preempted") == [RESTORED]
    with spikes_in(), preempted_before(SPIKE + 2):
        train_here(config, root / "preempted", *options)
    with spikes_in():
        train_here(config, root / "preempted", *options)
    with spikes_in(EARLY):
        train_here(config, root / "early", ROLLBACK)
        train_here(config, root / "early stopped", ROLLBACK, f"train.stop_after_steps={EARLY - 1}")
        train_here(config, root / "early stopped", ROLLBACK)


def _runs(config: Path, root: Path) -> str:
    with without_the_window():
        train_here(config, root / "expected")
    with spikes_in(SPIKE):
        train_here(config, root / "rolled", ROLLBACK)
    with spikes_in(SPIKE, crash_at=SPIKE + 3), suppress(KeyboardInterrupt):
        train_here(config, root / "killed", ROLLBACK)
    assert len(losses(root / "killed")) == RESTORED + 1
    with spikes_in():  # the record alone leaves the batches out
        train_here(config, root / "killed", ROLLBACK)
    try:
        with spikes_in(EARLY, SPIKE, SPIKE + 1):
            train_here(config, root / "limited", ROLLBACK, "train.max_rollbacks=1")
    except NumericError as error:
        saved = steps_saved(root / "limited")
        with spikes_in(SPIKE, SPIKE + 1):
            train_here(config, root / "limited", ROLLBACK, "train.max_rollbacks=2")
        return f"{saved} {error}"
    return "no error"


def dropout_config(root: Path) -> Path:
    tables = {"train": {"steps": STEPS}, "checkpoint": {"every_steps": RESTORED}, "data": {"validation": []}}
    return write_config(root, model=model_table() | DROPOUT, **tables)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root: Path = tmp_path_factory.mktemp("rollback")
    (error,) = run_ranks(1, _runs, dropout_config(root), root)
    return root, error


def messages(folder: Path) -> list[str]:
    """The messages of a run's events."""
    return [json.loads(line)["message"] for line in (folder / "incidents.jsonl").read_text().splitlines()]


def without_batches(folder: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in line if name != "batch"} for line in ledger(folder)]


def assert_same(run: Path, expected: Path) -> None:
    """Equal bits of weights and state, metrics and samples of each step."""
    found, wanted = checkpoint_tensors(run), checkpoint_tensors(expected)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert metrics(run) == metrics(expected)
    assert without_batches(run) == without_batches(expected)


def test_a_run_that_rolls_back_ends_as_one_without_the_batches_of_the_window(runs):
    root, _ = runs
    assert_same(root / "rolled", root / "expected")
    assert [line["step"] for line in metrics(root / "rolled")] == [*range(1, STEPS + 1)]


def test_a_run_killed_after_a_rollback_continues_with_the_same_bits(runs):
    root, _ = runs
    assert_same(root / "killed", root / "expected")
    assert ledger(root / "killed") == ledger(root / "rolled")


def test_a_run_stopped_between_a_checkpoint_and_a_spike_has_the_bits_of_one_that_was_not(runs, tmp_path):
    run_ranks(1, _preempted, dropout_config(tmp_path), tmp_path)
    assert_same(tmp_path / "preempted", runs[0] / "expected")
    assert ledger(tmp_path / "preempted") == ledger(runs[0] / "rolled")
    assert_same(tmp_path / "early stopped", tmp_path / "early")


def test_the_ledger_checkpoints_and_events_show_what_was_left_out(runs):
    rolled = runs[0] / "rolled"
    read = [line.get("batch", line["step"]) for line in ledger(rolled)]
    assert read == [*range(1, RESTORED + 1), *range(SPIKE + 1, STEPS + LEFT_OUT + 1)]
    orders = [
        json.loads((rolled / "checkpoints" / step_directory(step) / STATE_FILE).read_text())["order"]
        for step in (RESTORED, STEPS)
    ]
    assert [order.get("skipped batches") for order in orders] == [None, [[RESTORED + 1, SPIKE]]]
    (rollback,) = json.loads((rolled / "rollbacks.json").read_text())["rollbacks"]
    assert (rollback["step"], rollback["spike_step"]) == (RESTORED, SPIKE)
    assert (rollback["first_batch"], rollback["last_batch"]) == (RESTORED + 1, SPIKE)
    assert next(each for each in messages(rolled) if "spike" in each).startswith(f"step {SPIKE}: spike: loss ")
    (message,) = [each for each in messages(rolled) if "rolled back" in each]
    assert message == (
        "rolled back from step 8 to the checkpoint of step 6: batches 7 to 8 of the sample order are left out "
        "(rollback 1 of train.max_rollbacks = 3)"
    )


def test_a_spike_before_the_first_checkpoint_is_left_out(runs):
    limited = runs[0] / "limited"
    assert [line["step"] for line in ledger(limited) if "skipped" in line] == [EARLY]
    assert f"no checkpoint before step {EARLY} to roll back to: the run goes on after it" in messages(limited)
    first, *_ = json.loads((limited / "rollbacks.json").read_text())["rollbacks"]
    assert first["spike_step"] == SPIKE


def test_a_spike_beyond_the_number_of_rollbacks_ends_the_run(runs):
    root, error = runs
    assert error.startswith(f"[{RESTORED}] step 7: a spike after 1 rollbacks (from step 8 to 6), and ")
    assert "train.max_rollbacks = 1 allows no more; its update was left out, and the checkpoints are unchanged" in error
    assert "Samples of step 7, by data-parallel rank: 0: " in error
    # With one more, the run continues: the second window follows the first one.
    read = [line.get("batch", line["step"]) for line in ledger(root / "limited")]
    assert read == [*range(1, RESTORED + 1), *range(SPIKE + 2, STEPS + LEFT_OUT + 2)]


MESHES: dict[int, list[Sequence[str]]] = {
    2: [(), ("parallel.tp=2",), ("parallel.pp=2",), ("checkpoint.background=true", "parallel.shard=1")],
    3: [("parallel.cp=3",)],
}


def _on_ranks(config: Path, root: Path, meshes: Sequence[Sequence[str]]) -> None:
    for number, mesh in enumerate(meshes):
        with spikes_in(SPIKE):
            train_here(config, root / f"rolled-{number}", ROLLBACK, *mesh)
        with spikes_in(SPIKE, crash_at=SPIKE + 3), suppress(KeyboardInterrupt):
            train_here(config, root / f"killed-{number}", ROLLBACK, *mesh)


def _resume(config: Path, root: Path, folders: Sequence[str]) -> None:
    for folder in folders:
        with spikes_in():
            train_here(config, root / folder, ROLLBACK, "train.micro_batch_size=1")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MESHES)
def test_rollbacks_on_a_mesh_and_their_resumption_in_one_process_read_the_same_samples(runs, tmp_path, world_size):
    expected = runs[0] / "rolled"
    config = dropout_config(tmp_path)
    run_ranks(world_size, _on_ranks, config, tmp_path, MESHES[world_size])
    killed = [f"killed-{number}" for number in range(len(MESHES[world_size]))]
    run_ranks(1, _resume, config, tmp_path, killed)
    for folder in [*killed, *(name.replace("killed", "rolled") for name in killed)]:
        assert ledger(tmp_path / folder) == ledger(expected)
        assert losses(tmp_path / folder) == pytest.approx(losses(expected), rel=1e-5)


def _ended_in_the_rollback(config: Path, root: Path) -> None:
    load = FullyShardedEngine.load

    def dying(*_: Any) -> None:
        raise KeyboardInterrupt

    with spikes_in(SPIKE):
        with patch.object(FullyShardedEngine, "load", dying), suppress(KeyboardInterrupt):
            train_here(config, root / "killed", ROLLBACK)
        assert FullyShardedEngine.load is load
        train_here(config, root / "killed", ROLLBACK)
        read = StepReader.read

        def reading(reader: StepReader, batch: int, **options: Any) -> StepData:
            if batch == SPIKE + 1 and not (root / "preempted" / "rollbacks.json").exists():
                os.kill(os.getpid(), signal.SIGTERM)
            return read(reader, batch, **options)

        with (
            patch.object(StepReader, "read", reading),
            pytest.raises(PreemptedError, match=f"SIGTERM after {RESTORED} of {STEPS} steps"),
        ):
            train_here(config, root / "preempted", ROLLBACK)
        train_here(config, root / "preempted", ROLLBACK)


@pytest.mark.slow
def test_a_run_killed_or_preempted_in_a_rollback_continues_with_the_same_bits(runs, tmp_path):
    run_ranks(1, _ended_in_the_rollback, dropout_config(tmp_path), tmp_path)
    for name in ("killed", "preempted"):
        assert_same(tmp_path / name, runs[0] / "expected")


def _refused(config: Path, run: Path, contents: Sequence[str]) -> list[str]:
    messages = []
    for content in contents:
        (run / "rollbacks.json").write_text(content)
        with pytest.raises(CheckpointError) as refused:
            train_here(config, run, ROLLBACK)
        messages.append(str(refused.value))
    return messages


def test_rollbacks_that_do_not_fit_the_checkpoint_are_refused(runs, tmp_path):
    run = shutil.copytree(runs[0] / "expected", tmp_path / "run")
    file = run / "rollbacks.json"
    rollback = {"step": 3, "spike_step": 5, "first_batch": 4, "last_batch": 5, "loss": 1.0, "grad_norm": 1.0}
    expected = {
        json.dumps({"rollbacks": [rollback]}): "step-00000010 was trained on batches 4 to 5, which the run left out "
        "when it rolled back to step 3: it was not valid then. Move it away",
        "[": f"{file}: not the rollbacks of a run (no JSON); restore it, or move it away",
        '{"rollbacks": [{}]}': f"{file}: not the rollbacks of a run (rollbacks.0.step: Field required)",
    }
    (found,) = run_ranks(1, _refused, runs[0] / "tiny.toml", run, [*expected])
    for message, part in zip(found, expected.values(), strict=True):
        assert part in message


def test_rollbacks_need_a_checkpoint_before_the_end_and_an_order_without_one(tmp_path):
    config = write_config(tmp_path)
    for overrides, message in (
        (["checkpoint.every_steps=12"], "restores a checkpoint, and the only one is that of the last step"),
        (["data.order=megatron"], "has no samples beyond those of train.steps to replace the ones left out"),
        (["train.max_rollbacks=-1"], "max_rollbacks"),
        (["train.engine=deepspeed"], 'train.on_spike = "rollback" with train.engine = "deepspeed"'),
    ):
        with pytest.raises(ConfigError, match=message):
            load_run_config(config, [ROLLBACK, *overrides])
    load_run_config(config, [ROLLBACK, "checkpoint.every_steps=12", "checkpoint.keep_steps=[4]"])


@pytest.mark.parametrize(
    ("step", "table", "scheduled"),
    [
        (6, {"every_steps": 3, "keep_steps": []}, True),
        (7, {"every_steps": 3, "keep_steps": []}, False),
        (7, {"every_steps": 3, "keep_steps": [7]}, True),
        (7, {"every_steps": None, "keep_steps": [6]}, False),
    ],
)
def test_checkpoints_are_scheduled_by_their_own_config(step, table, scheduled):
    config: dict[str, Any] = {"model": {}, "train": {}, "checkpoint": table | {"keep_latest": 1}}
    state = TrainState(step=step, order={}, config=config, versions={})
    assert is_scheduled(state) is scheduled
    for broken in ({}, {"checkpoint": 7}, {"checkpoint": table | {"every_steps": "x"}}):
        with pytest.raises(
            CheckpointError, match=rf"of step {step}: its config has no checkpoint.every_steps and keep_ste"
        ):
            is_scheduled(state.model_copy(update={"config": broken}))
