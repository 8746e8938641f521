"""Runs with checkpoint.background: the files of a run without it, and errors that reach every rank."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalin.checkpoint.config import CheckpointConfig
from megalin.errors import MegalinError
from megalin.parallel.agreement import rank
from tests.checkpoint.test_background import changed_writes
from tests.model_runs import losses, steps_saved, train_here, write_config
from tests.ranks import run_ranks
from tests.train.test_update_hooks import WeightAverage

BACKGROUND = "checkpoint.background=true"
FP16 = ("train.dtype=float16", "train.loss_scale.initial=524288.0", "train.loss_scale.growth_interval=2")
DEEPSPEED = 'train.engine="deepspeed"'
RARE_SAVES = ("train.steps=500", "checkpoint.every_steps=400", "checkpoint.keep_steps=[1,2,4]")
CASES: dict[str, tuple[int, Sequence[str]]] = {
    "tp2 fp16": (2, ("parallel.tp=2", *FP16)),
    "pp2": (2, ("parallel.pp=2", "train.micro_batch_size=1")),
    "cp2": (2, ("parallel.cp=2",)),
    "zero1 fp16": (2, (DEEPSPEED, "parallel.zero=1", *FP16)),
    "zero3": (2, (DEEPSPEED, "parallel.zero=3")),
    "tp2 dp2": (4, ("parallel.tp=2",)),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables: dict[str, dict[str, Any]] = {
        "train": {"steps": 6},
        "checkpoint": {"every_steps": 2, "keep_steps": [1], "keep_latest": 2},
    }
    return write_config(tmp_path_factory.mktemp("background"), **tables)


def _in_both_ways(config: Path, root: Path, overrides: Sequence[str]) -> None:
    train_here(config, root / "front", *overrides, hooks=[WeightAverage()])
    with changed_writes(lambda _: time.sleep(0.1)):  # later steps change the weights meanwhile
        train_here(config, root / "back", *overrides, BACKGROUND, hooks=[WeightAverage()])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_are_those_of_a_run_in_the_foreground(config: Path, tmp_path: Path, name: str) -> None:
    world_size, overrides = CASES[name]
    run_ranks(world_size, _in_both_ways, config, tmp_path, overrides)
    front, back = tmp_path / "front", tmp_path / "back"
    assert losses(front) == losses(back)
    assert steps_saved(front) == steps_saved(back) == [1, 4, 6]
    files = sorted(path.relative_to(front) for path in front.glob("checkpoints/step-*/*"))
    assert len(files) == 3 * (world_size + 3)
    for file in files:
        if file.name not in ("train_state.json", "manifest.json"):  # the config's value differs
            assert (front / file).read_bytes() == (back / file).read_bytes(), file
    lines = [json.loads(line) for line in (back / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "save_seconds" in line] == [2, 3, 5]
    assert (
        len([line for line in lines if line.get("save_write_seconds", 0.0) > 0.1]) >= 2
    )  # the last may end after the last line


def _fail_on_rank_one(path: Path) -> None:
    if rank() == 1 and "step-00000004" in str(path):
        raise OSError(errno.ENOSPC, "No space left on device")


def _fail_after_sigterm(path: Path) -> None:
    if rank() == 1 and "step-00000004" in str(path):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        _fail_on_rank_one(path)


def _stall_on_rank_one(path: Path) -> None:
    if rank() == 1 and "step-00000004" in str(path):
        time.sleep(3.0)


def _message(config: Path, folder: Path, change: Callable[[Path], None], *overrides: str) -> str:
    with changed_writes(change), pytest.raises(MegalinError) as raised:
        train_here(config, folder, *overrides, BACKGROUND, *RARE_SAVES)
    return f"{type(raised.value).__name__}: {raised.value}"


def _messages(config: Path, root: Path) -> list[str]:
    return [
        _message(config, root / "full", _fail_on_rank_one),
        _message(config, root / "sigterm", _fail_after_sigterm),
        _message(config, root / "stalled", _stall_on_rank_one, "train.phase_timeout_seconds=1"),
    ]


def test_save_that_fails_or_stalls_on_one_rank_ends_the_run_on_every_rank(config: Path, tmp_path: Path) -> None:
    messages = run_ranks(2, _messages, config, tmp_path)
    assert messages[0] == messages[1]
    full, sigterm, stalled = messages[0]
    for name, message in (("full", full), ("sigterm", sigterm)):
        assert message.startswith(f"StorageError: cannot save to {tmp_path}/{name}/checkpoints: rank 1: [Errno 28] ")
    assert stalled.startswith("RankStalledError: rank 1 stalled: writing the checkpoint of step 4 to ")
    for name in ("full", "sigterm", "stalled"):
        assert steps_saved(tmp_path / name) == [1, 2]
        assert len(losses(tmp_path / name)) < 350, "the error was raised by the next save"


@pytest.mark.parametrize("steps", [[], [12]])
def test_run_without_a_save_in_the_background_is_refused(steps: list[int]) -> None:
    (problem,) = CheckpointConfig(background=True, keep_steps=steps).problems(12)
    assert problem.startswith("checkpoint.background = true without every_steps or keep_steps: ")
    assert CheckpointConfig(background=True, keep_steps=[3]).problems(12) == []
