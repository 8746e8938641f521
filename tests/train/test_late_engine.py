"""Checkpoints and evaluations of an engine whose results are always late: those of a run that stops at their step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalin.checkpoint.index import DTYPES
from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint, read_manifest, step_directory
from megalin.data.batch import AnyBatch
from megalin.data.loader import Loader
from megalin.errors import DataError, PreemptedError
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train import engine_choice
from megalin.train.config import RunConfig
from megalin.train.engine import FullyShardedEngine
from megalin.train.step import PendingStep, StepResult
from megalin.train.update_hooks import UpdateHook
from tests.model_runs import CPU, metrics, steps_saved, train_here, write_config

EVALUATED = "train.evaluate_every_steps=7"
"""With a checkpoint every 4 steps nothing is due after steps 5 and 6: step 5 is in flight where step 6 is read."""


class LateStep:
    """A step that runs at the first call of `run`; its result is ready once it has been waited for."""

    def __init__(self, launch: Callable[[], PendingStep]) -> None:
        self._launch = launch
        self._pending: PendingStep | None = None
        self.is_ready = False

    def run(self) -> PendingStep:
        if self._pending is None:
            self._pending = self._launch()
        return self._pending

    def wait(self) -> StepResult:
        result = self.run().wait()
        self.is_ready = True
        return result


class LateEngine(FullyShardedEngine):
    """Engine whose steps are never ready before they are waited for.

    A step runs in full at its launch (`deferred` False): weights that are read after the next launch are then too new.
    Or it runs no earlier than the next launch or the wait for its result (`deferred` True): weights that are read
    before that wait are then too old.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        hooks: Sequence[UpdateHook] = (),
        *,
        deferred: bool,
        signalled_step: int | None,
    ) -> None:
        super().__init__(config, mesh, hooks)
        self._deferred, self._signalled_step = deferred, signalled_step
        self._last: LateStep | None = None

    def step(self, batches: Sequence[AnyBatch], *, learning_rate: float, step: int) -> LateStep:
        if self._last is not None:
            self._last.run()
        launch = partial(super().step, batches, learning_rate=learning_rate, step=step)
        self._last = LateStep(launch)
        if not self._deferred:
            self._last.run()
        if step == self._signalled_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._last


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = {"train": {"steps": 9}, "checkpoint": {"every_steps": 4}}
    return write_config(tmp_path_factory.mktemp("late"), **tables)


@pytest.fixture(scope="module")
def stopped(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """Runs of the usual engine, by the step after which they stopped."""
    folders = {step: tmp_path_factory.mktemp(f"stopped {step}") for step in (4, 5, 8, 9)}
    for step, folder in folders.items():
        run(config, folder, EVALUATED, f"train.stop_after_steps={step}")
    return folders


def run(config: Path, folder: Path, *overrides: str, expected: AbstractContextManager[Any] | None = None) -> None:
    """Trains in this process only."""
    with process_group(CPU), expected or nullcontext():
        train_here(config, folder, *overrides)


def saved_tensors(folder: Path, step: int) -> Mapping[str, Tensor]:
    """Every tensor of the checkpoint of `step`."""
    directory = folder / "checkpoints" / step_directory(step)
    checkpoint = Checkpoint(directory, read_manifest(directory))
    records = checkpoint.index().tensors
    tensors = {
        name: torch.full(record.shape, torch.nan, dtype=DTYPES[record.dtype]) for name, record in records.items()
    }
    load(checkpoint, tensors)
    return tensors


@pytest.mark.parametrize("deferred", [False, True])
def test_checkpoint_of_a_step_holds_the_weights_of_a_run_that_stops_there(
    config, stopped, tmp_path, monkeypatch, deferred
):
    late = partial(LateEngine, deferred=deferred, signalled_step=5)
    monkeypatch.setattr(engine_choice, "FullyShardedEngine", late)
    preempted = pytest.raises(PreemptedError, match="SIGTERM after 5 of 9 steps, all of them saved")
    run(config, tmp_path, EVALUATED, expected=preempted)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    run(config, tmp_path, EVALUATED)
    assert steps_saved(tmp_path) == [4, 5, 8, 9]
    for step, folder in stopped.items():
        actual, expected = saved_tensors(tmp_path, step), saved_tensors(folder, step)
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(actual[name], expected[name])] == [], step
    assert metrics(tmp_path) == metrics(stopped[9])
    assert [line["step"] for line in metrics(tmp_path) if "evaluation_loss" in line] == [7, 9]


@pytest.mark.parametrize("deferred", [False, True])
def test_step_in_flight_is_finished_before_a_data_error_is_raised(config, stopped, tmp_path, monkeypatch, deferred):
    read = Loader.step

    def failing(loader: Loader[Any], step: int) -> Any:
        if step == 5:
            raise DataError("shard.bin: gone")
        return read(loader, step)

    monkeypatch.setattr(Loader, "step", failing)
    monkeypatch.setattr(
        engine_choice, "FullyShardedEngine", partial(LateEngine, deferred=deferred, signalled_step=None)
    )
    run(config, tmp_path, EVALUATED, expected=pytest.raises(DataError, match=r"shard.bin: gone"))
    assert metrics(tmp_path) == metrics(stopped[9])[:5]
    assert steps_saved(tmp_path) == [4]
