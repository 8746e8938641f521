"""The training loop: effects of evaluation, compilation and recomputation, in-flight steps, and errors of one rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import megalin.train.loop as loop
import megalin.train.step as steps
from megalin.data.datasets.token import TokenDataset
from megalin.data.loader import Loader
from megalin.errors import ConfigError, DataError, NumericError
from megalin.model.build import make_model
from megalin.parallel.process_group import process_group
from megalin.train.config import load_run_config
from megalin.train.engine import FullyShardedEngine
from megalin.train.loop import TrainResult
from megalin.train.run_folder import RunFolder
from megalin.train.run_log import RunLog
from megalin.train.step import LaunchedStep
from tests.model_runs import CPU, late_results, losses, metrics, steps_saved, train_here, write_config
from tests.ranks import RankFailedError, run_ranks


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("loop"), checkpoint={"every_steps": 50})


def run(config: Path, folder: Path, *overrides: str) -> TrainResult:
    """Trains in this process only."""
    with process_group(CPU):
        return train_here(config, folder, *overrides)


@pytest.fixture(scope="module")
def plain(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    run(config, folder)
    return folder


def test_evaluating_during_training_does_not_change_it(config, plain, tmp_path):
    overrides = ["train.evaluate_every_steps=3", "train.evaluate_batches=5"]  # the whole split
    result = run(config, tmp_path, *overrides)
    assert losses(tmp_path) == losses(plain)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [3, 6, 9, 12]
    assert lines[-1] == metrics(plain)[-1]
    assert result.evaluation is not None
    assert result.evaluation.loss == lines[-1]["evaluation_loss"]


def test_evaluation_reads_as_many_batches_as_asked(config, tmp_path):
    overrides = ["train.evaluate_every_steps=1", "train.evaluate_batches=1", "train.steps=3"]
    run(config, tmp_path, *overrides)
    tokens = [line["evaluation_tokens"] for line in _raw(tmp_path)]
    assert tokens[0] == tokens[1] == tokens[2] <= 4 * 36


def test_evaluation_reads_a_limited_number_of_samples_by_default(config, tmp_path, monkeypatch):
    """The run also compares the results of self-tests over the ranks, once."""
    compared = []
    monkeypatch.setattr(steps, "check_same_self_tests", lambda: compared.append(1))
    assert loop._EVALUATED_SAMPLES == 1000
    monkeypatch.setattr(loop, "_EVALUATED_SAMPLES", 5)
    run(config, tmp_path, "train.steps=3", "train.evaluate_every_steps=2")
    assert compared == [1]
    first, last = (line["evaluation_tokens"] for line in _raw(tmp_path) if "evaluation_tokens" in line)
    assert first == last <= 5 * 36
    assert last > 4 * 20


def _raw(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tokens_and_flops_are_those_of_the_run_so_far(config, plain):
    values = load_run_config(config, [])
    tokens, length = values.train.global_batch_size * values.data.sequence_length, values.data.sequence_length
    per_token = make_model(values.model).training_flops(length)
    for line in _raw(plain):
        assert (line["tokens"], line["flops"]) == (line["step"] * tokens, line["step"] * tokens * per_token)


def test_recomputation_gives_the_same_losses(config, plain, tmp_path):
    run(config, tmp_path, "train.recompute=true")
    assert metrics(tmp_path) == metrics(plain)


def test_a_run_prints_the_kernels_that_it_runs(plain, config, tmp_path, capsys):
    run(config, tmp_path, "train.stop_after_steps=1")
    assert "decay_scan reference" in capsys.readouterr().out.partition("kernels: ")[2].splitlines()[0]
    kernels = json.loads((plain / "kernels.json").read_text())
    assert kernels["decay_scan"] == {"backend": "reference", "reason": "device cpu"}


def test_run_without_validation_evaluates_nothing(config, plain, tmp_path):
    with process_group(CPU):
        result = train_here(config, tmp_path, "data.validation=[]", loss_curve=True)
    assert result.evaluation is None
    assert losses(tmp_path) == losses(plain)
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_finished_run_whose_curve_cannot_be_written_is_complete(plain, config, tmp_path, caplog):
    shutil.copytree(plain, tmp_path / "run")
    (tmp_path / "run" / "loss.png").mkdir()
    with process_group(CPU):
        assert train_here(config, tmp_path / "run", loss_curve=True).step == 12
    assert "no loss curve: " in caplog.text
    assert "loss.png: cannot be written (Is a directory)" in caplog.text


def test_bf16_run_follows_the_fp32_run(config, plain, tmp_path):
    run(config, tmp_path, "train.dtype=bfloat16")
    assert losses(tmp_path) == pytest.approx(losses(plain), rel=2e-2)
    assert losses(tmp_path) != losses(plain)


def test_checkpoints_are_kept_as_asked(config, tmp_path):
    run(config, tmp_path, "checkpoint.every_steps=5", "checkpoint.keep_latest=2")
    assert steps_saved(tmp_path) == [10, 12]


@pytest.mark.slow
def test_compiled_blocks_give_the_same_losses(config, tmp_path):
    layers = '[{sublayers=[{type="transnormer",num_heads=4,lrpe="rotation"}],repeat=2}]'
    overrides = [f"model.layers={layers}", "train.steps=4", "data.validation=[]"]
    run(config, tmp_path / "eager", *overrides)
    run(config, tmp_path / "compiled", *overrides, "train.compile=true")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=2e-5)


@pytest.fixture(name="late_results")
def _late_results() -> Iterator[None]:
    with late_results():
        yield


def test_a_step_whose_result_is_known_ends_at_once(config, plain):
    seconds = [line["step_seconds"] for line in _raw(plain)]
    assert min(seconds) > 0.1 * statistics.median(seconds)


@pytest.mark.usefixtures("late_results")
def test_a_step_is_waited_for_after_the_next_one_was_started(config, tmp_path, monkeypatch):
    order: list[str] = []

    def recorded(name: str, call: Callable[..., Any], number: Callable[..., int]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            order.append(f"{name} {number(*args, **options)}")
            return call(*args, **options)

        return wrapper

    monkeypatch.setattr(Loader, "step", recorded("read", Loader.step, lambda _, step: step + 1))
    start = recorded("start", FullyShardedEngine.step, lambda *_, step, **__: step)
    monkeypatch.setattr(FullyShardedEngine, "step", start)
    monkeypatch.setattr(LaunchedStep, "wait", recorded("wait", LaunchedStep.wait, lambda step: step._step))
    run(config, tmp_path, "train.steps=9", "checkpoint.every_steps=4", "train.evaluate_every_steps=7")
    assert order == [
        *("read 1", "start 1", "wait 1"),  # at once: the kernels are printed
        *("read 2", "start 2", "read 3", "start 3", "wait 2", "read 4", "start 4", "wait 3", "wait 4"),  # saved
        *("read 5", "start 5", "read 6", "start 6", "wait 5", "read 7", "start 7", "wait 6", "wait 7"),  # evaluated
        *("read 8", "start 8", "wait 8"),  # saved
        *("read 9", "start 9", "wait 9"),
    ]


@pytest.mark.usefixtures("late_results")
@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_is_not_finite_ends_the_run_with_all_that_was_before(config, plain, tmp_path, monkeypatch, step):
    count, accumulate = 0, steps.accumulate_gradients

    def spoiled(*args: Any) -> tuple[Tensor, Tensor]:
        nonlocal count
        count += 1
        losses, counts = accumulate(*args)
        return losses * (float("nan") if count == step else 1.0), counts

    monkeypatch.setattr(steps, "accumulate_gradients", spoiled)
    overrides = ["checkpoint.every_steps=3", "checkpoint.keep_latest=9"]
    with pytest.raises(NumericError, match=f"step {step}: loss nan.* first in no parameter: the loss itself"):
        run(config, tmp_path, *overrides)
    assert count == step + 1  # the next step had been launched
    assert metrics(tmp_path) == metrics(plain)[: step - 1]
    assert steps_saved(tmp_path) == [3]
    run(config, tmp_path, *overrides)
    assert metrics(tmp_path) == metrics(plain)


def _messages(config: Path, folder: Path, overrides: list[str]) -> str:
    """The error that ends a run on this rank."""
    with pytest.raises((ConfigError, DataError)) as raised:
        train_here(config, folder, *overrides)
    return str(raised.value)


def _bad_data_on_rank_one(config: Path, folder: Path, overrides: list[str]) -> str:
    if dist.get_rank() == 1:
        read, count = TokenDataset.batch, 0

        def failing(self: TokenDataset, samples: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                raise DataError("shard.bin: token id 999 at offset 3 of sequence 2")
            return read(self, samples)

        TokenDataset.batch = failing  # type: ignore[method-assign]
    return _messages(config, folder, overrides)


@pytest.mark.parametrize("overrides", [[], ["parallel.tp=2"]], ids=["dp2", "tp2"])
def test_bad_data_of_one_rank_ends_the_run_on_every_rank(config, tmp_path, overrides):
    messages = run_ranks(2, _bad_data_on_rank_one, config, tmp_path / "run", ["train.steps=100", *overrides])
    assert (
        messages == ["rank 1: shard.bin: token id 999 at offset 3 of sequence 2"] * 2
        or messages == ["shard.bin: token id 999 at offset 3 of sequence 2"] * 2
    )
    assert steps_saved(tmp_path / "run") == []


def _data_missing_on_rank_one(config: Path, folder: Path) -> str:
    os.chdir(folder if dist.get_rank() == 1 else config.parent)
    with pytest.raises(DataError) as raised:
        train_here(config, folder, 'data.train=["data/train"]')
    return str(raised.value)


def test_data_missing_on_one_rank_end_the_run_on_every_rank(config, tmp_path):
    messages = run_ranks(2, _data_missing_on_rank_one, config, tmp_path, collective_timeout=5.0)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: data/train")


def _stop_rank_one(config: Path, folder: Path) -> None:
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunLog, "write", lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
            train_here(config, folder)
    train_here(config, folder)


def test_the_rank_that_stalls_is_named_among_the_incidents(config, tmp_path):
    with pytest.raises(RankFailedError):
        run_ranks(2, _stop_rank_one, config, tmp_path, collective_timeout=2.0)
    last = json.loads((tmp_path / "incidents.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "error"
    assert last["message"].startswith("RankStalledError: rank 0: a collective failed, no response from rank 1: ")


def _other_config_on_rank_one(config: Path, folder: Path, overrides: list[str]) -> str:
    return _messages(config, folder, [overrides[dist.get_rank()]])


@pytest.mark.parametrize(
    ("overrides", "value", "first"),
    [
        (["optimizer.lr=1e-2", "optimizer.lr=2e-2"], "optimizer.lr = 0.02", "0.01"),
        (["parallel.tp=4", "parallel.tp=2", "parallel.tp=4", "parallel.tp=4"], "parallel.tp = 2", "4"),
    ],
)
def test_ranks_with_different_configs_are_refused(config, tmp_path, overrides, value, first):
    messages = run_ranks(len(overrides), _other_config_on_rank_one, config, tmp_path / "run", overrides)
    host = socket.gethostname()
    message = (
        "ranks differ in what decides the run's numbers; give all of them the same installation, environment, config "
        f"and files:\n  rank 1 ({host}) has {value}, rank 0 ({host}) {first}"
    )
    assert messages == [message] * len(overrides)


def _use_twice(config: Path, folder: Path) -> str:
    with RunFolder(folder):
        return _messages(config, folder, [])


def test_run_folder_in_use_is_refused_on_every_rank(config, tmp_path):
    messages = run_ranks(2, _use_twice, config, tmp_path / "run")
    assert messages[0] == messages[1]
    assert "is in use by pid" in messages[0]
