"""`megalin train`: runs in one process and under torchrun, and the message and exit code of every bad input."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalin.__main__ import main
from megalin.train.run_folder import RunFolder
from tests.model_runs import losses, metrics, steps_saved, write_config, write_shard
from tests.ranks import run_ranks

CONFIG, DATA, CHECKPOINT, STORAGE, NUMERIC = 2, 3, 4, 5, 8
"""Exit codes of the error classes."""


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A writable copy of the finished run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_run_folder_holds_all_that_the_run_made(trained, capsys):
    assert {path.name for path in trained.iterdir()} == {
        *(".lock", "checkpoints", "config.toml", "environment.json", "identity.json", "incidents.jsonl"),
        *("kernels.json", "ledger.jsonl", "loss.png", "metrics.jsonl", "tensorboard"),
    }
    assert steps_saved(trained) == [2, 4, 6, 8, 10, 12]
    line = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 12
    assert line["tokens"] == 12 * 4 * 36
    assert line["tokens_per_second"] == pytest.approx(4 * 36 / line["step_seconds"])
    assert {"grad_norm", "data_wait_seconds", "peak_memory_bytes", "evaluation_bits_per_byte"} <= line.keys()
    assert [(line["step"], line["kind"], line["message"]) for line in _incidents(trained)] == [
        (0, "started", "on 1 x cpu")
    ]


def test_start_lines_name_the_run_and_warn_of_suspicious_values(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megalin.train.start_lines.CPU_FLOPS_PER_SECOND", 1e3)
    arguments = ["train", str(config), "--folder", str(tmp_path / "run"), "train.stop_after_steps=1"]
    assert main([*arguments, "train.steps=4000", "train.dtype=bfloat16", "train.evaluate_batches=1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"model: transnormer, glu, tnl; [\d,]+ parameters, \d+ blocks, width \d+, vocabulary 257", shown)
    assert "device: 1 x cpu, bfloat16, eager blocks" in shown
    assert "mesh: tp 1, cp 1, pp 1, dp 1, fsdp2" in shown
    assert "run: 4,000 steps; 144 tokens a step (4 x 36), 576,000 in all" in shown
    assert re.search(r"warning: train is read [\d.]+ times; above 4 epochs", shown)
    assert 'warning: train.dtype = "bfloat16" is slow on most CPUs' in shown
    assert re.search(r"warning: a step of [\d.e+]+ FLOPs takes about [\d.]+ (minutes|hours) on", shown)
    assert "compiles for minutes" not in shown


def test_a_model_beyond_the_memory_of_the_host_is_refused_on_a_cpu(config, tmp_path, fails, monkeypatch):
    monkeypatch.setattr("megalin.api.trainer.device_memory_bytes", lambda device: 600_000)
    message = fails(CONFIG, "train", config, "--folder", tmp_path / "run", "train.micro_batch_size=4")
    assert re.search(r"needs about .* GiB .* and a rank on this CPU has 0.0 GiB; use a GPU, a smaller model", message)


def _incidents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]


def test_a_start_shows_the_progress_of_its_slow_work(run, config, monkeypatch):
    fractions: dict[str, list[float]] = {}

    @contextmanager
    def record(name, *, shown=True):
        assert shown
        yield fractions.setdefault(name, []).append

    for place in ("train.run_data", "parallel.initialisation", "checkpoint.verification", "checkpoint.load"):
        monkeypatch.setattr(f"megalin.{place}.slow_work", record)
    assert main(["train", str(config), "--folder", str(run)]) == 0
    newest = run / "checkpoints" / "step-00000012"
    initialising = "initialising the weights"
    assert list(fractions) == [
        *("opening the data", "verifying the shards", f"verifying {newest}", initialising, f"loading {newest}"),
    ]
    assert fractions[initialising] == sorted(fractions[initialising])
    assert fractions[initialising][-1] == pytest.approx(1.0)


def test_finished_run_is_reported_as_finished(run, config, capsys):
    assert main(["train", str(config), "--folder", str(run)]) == 0
    assert "step 12 of 12 (nothing left to do)" in capsys.readouterr().out


def _under_torchrun(arguments: list[str], port: int) -> str:
    """Output of both ranks, in processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*command, "-m", "megalin", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _launched_rank(arguments: list[str], port: int) -> str:
    """Output of a rank with the environment of a launcher."""
    launch = {"RANK": dist.get_rank(), "WORLD_SIZE": 2, "LOCAL_RANK": dist.get_rank(), "MASTER_PORT": port}
    dist.destroy_process_group()
    os.environ |= {name: str(value) for name, value in launch.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    return printed.getvalue()


def _in_forked_ranks(arguments: list[str], port: int) -> str:
    return "".join(run_ranks(2, _launched_rank, arguments, port))


@pytest.mark.parametrize(
    "launch", [_in_forked_ranks, pytest.param(_under_torchrun, marks=pytest.mark.slow)], ids=["environment", "torchrun"]
)
def test_a_launcher_trains_with_tensor_parallel_ranks(config, trained, tmp_path, launch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = launch(["train", str(config), "--folder", str(tmp_path / "run"), "parallel.tp=2"], port)
    assert "validation: loss" in printed
    assert printed.count("step 12 of 12") == 1
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=2e-5)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["mesh"] == {"tp": 2, "cp": 1, "pp": 1, "dp": 1, "zero": 0}
    assert (environment["ranks"], environment["device"]) == (2, "cpu")
    assert environment["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "train.step: unknown key; did you mean 'steps'?"),
        ("optimiser.lr=1.0", "optimiser: unknown key; did you mean 'optimizer'?"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': input should be a valid number"),
        ("train.steps=0", "train.steps = 0: input should be greater than or equal to 1"),
        (
            "train.micro_batch_size=3",
            "train.global_batch_size = 4 is not divisible by train.micro_batch_size = 3; use a multiple of 3",
        ),
        ("schedule.warmup_steps=13", "schedule.warmup_steps = 13 is more than the 12 steps of the run"),
        ("train.stop_after_steps=13", "train.stop_after_steps = 13 is beyond train.steps = 12"),
        ("parallel.tp=2", "parallel.tp = 2 does not divide the number of ranks, 1; start a multiple of 2 ranks"),
        ("parallel.shard=2", "parallel.shard = 2 does not divide the data axis of 1 ranks"),
    ],
)
def test_bad_config_is_refused(fails, config, tmp_path, override, message):
    assert message in fails(CONFIG, "train", config, override, "--folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_all_problems_of_a_config_are_reported_at_once(fails, config):
    message = fails(
        CONFIG, "train", config, "train.step=3", "model.hidden_sise=3", "optimizer.lr=-1.0", "data.train=[]"
    )
    assert "4 problem(s)" in message
    for expected in ("train.step: unknown", "did you mean 'hidden_size'?", "optimizer.lr = -1.0", "data: train = []"):
        assert expected in message


@pytest.mark.parametrize(
    ("environment", "overrides", "message"),
    [
        ({"WORLD_SIZE": "3"}, ["parallel.tp=3"], r"num_heads = 4.* are not divisible by parallel.tp = 3; use tp 1, 2"),
        (
            {"WORLD_SIZE": "8"},
            ["parallel.tp=8"],
            r"model.layers.0.sublayers.0.num_heads = 4 is not divisible by parallel.tp = 8; use tp 1, 2, 4$",
        ),
        (
            {"WORLD_SIZE": "2"},
            ["parallel.pp=2", 'parallel.pp_transfer="symmetric_memory"'],
            'parallel.pp_transfer = "symmetric_memory" needs the copy engines of GPUs, but the ranks compute on cpu',
        ),
        (
            {"WORLD_SIZE": "2"},
            ["parallel.tp=2", "parallel.sequence_parallel=true", 'parallel.tp_overlap="symmetric_memory"'],
            'parallel.tp_overlap = "symmetric_memory" needs the copy engines of GPUs, but the ranks compute on cpu',
        ),
        ({"WORLD_SIZE": "3"}, ["parallel.tp=2"], "parallel.tp = 2 does not divide the number of ranks, 3"),
        (
            {"WORLD_SIZE": "3"},
            [],
            "global_batch_size = 4 is not divisible by .*micro_batch_size = 2 times the data axis of 3 ranks; use 6$",
        ),
        (
            {"WORLD_SIZE": "4"},
            ["train.global_batch_size=10"],
            "global_batch_size = 10 is not divisible by .* the data axis of 4 ranks; use 8 or 16$",
        ),
        (
            {"WORLD_SIZE": "2"},
            ["parallel.tp=2", "parallel.sequence_parallel=true", "data.sequence_length=35"],
            "sequence_length = 35 is not divisible by parallel.tp = 2, as parallel.sequence_parallel needs; use 34",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "2"},
            [],
            "RANK = 2 is not below WORLD_SIZE = 2; start the ranks with megalin launch",
        ),
        ({"WORLD_SIZE": "two"}, [], "environment variable WORLD_SIZE = 'two' is not a number"),
        ({"LOCAL_RANK": "-1"}, [], "environment variable LOCAL_RANK = '-1' is not a number"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_before_they_connect(
    fails, config, tmp_path, monkeypatch, environment, overrides, message
):
    launch = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (launch | environment).items():
        monkeypatch.setenv(name, value)
    assert re.search(message, fails(CONFIG, "train", config, *overrides, "--folder", tmp_path / "run"), re.MULTILINE)


def test_config_file_that_is_missing_is_refused(fails):
    assert "nowhere.toml: no such config file" in fails(CONFIG, "train", "nowhere.toml")


def _bad_shard(folder: Path, what: str) -> Path:
    config = write_config(folder, checkpoint={"every_steps": 2})
    train, validation = folder / "data" / "train", folder / "data" / "validation"
    if what == "missing":
        train.with_suffix(".idx").unlink()
    elif what == "truncated":
        os.truncate(train.with_suffix(".bin"), 100)
    elif what == "truncated index":
        os.truncate(train.with_suffix(".idx"), 60)
    elif what == "swapped":
        shutil.copy(validation.with_suffix(".bin"), train.with_suffix(".bin"))
    elif what == "corrupt":
        train.with_suffix(".idx").write_bytes(b"no magic" * 20)
    elif what == "empty":
        write_shard(train, [])
    return config


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", r"train.idx: no such file"),
        ("truncated", r"train.bin: expected \d+ bytes.*; found 100"),
        ("truncated index", r"train.idx: expected .*; found"),
        ("swapped", r"train.bin: expected \d+ bytes.*; found \d+"),
        ("corrupt", r"train.idx: expected .*; found"),
        ("empty", r"train: empty corpus: the train split has no tokens; give shards with text"),
    ],
)
def test_bad_shard_is_refused(fails, tmp_path, what, message):
    config = _bad_shard(tmp_path, what)
    assert re.search(message, fails(DATA, "train", config, "--folder", tmp_path / "run"))
    assert steps_saved(tmp_path / "run") == []


def test_sequence_longer_than_the_data_is_refused(fails, config, tmp_path):
    message = fails(DATA, "train", config, "data.sequence_length=5000", "--folder", tmp_path / "run")
    assert re.search(r"data.sequence_length = 5000 needs 5001 tokens, but the train split has \d+; lower", message)


def test_token_beyond_the_vocabulary_stops_the_run(fails, config, tmp_path):
    without_tokenizer = tmp_path / "config.toml"
    without_tokenizer.write_text(config.read_text().replace('tokenizer = "bytes"', ""))
    message = fails(DATA, "train", without_tokenizer, "model.vocab_size=200", "--folder", tmp_path / "run")
    assert re.search(r"train.bin: token id 256 at offset \d+ of sequence \d+; expected ids from 0 to 199", message)
    assert steps_saved(tmp_path / "run") == []


def test_tokenizer_with_more_ids_than_the_model_is_refused(fails, config, tmp_path):
    message = fails(CONFIG, "train", config, "model.vocab_size=256", "--folder", tmp_path / "run")
    assert "bytes: has 257 token ids, but the model's vocab_size is 256; raise vocab_size to at least 257" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab_size=300", "model.vocab_size: 257 in the checkpoint, 300 in the config"),
        ("model.vocab_size=500", "model.vocab_size: 257 in the checkpoint, 500 in the config"),
        ("model.hidden_size=64", "model.hidden_size: 32 in the checkpoint, 64 in the config"),
        (
            "model.layers.0.sublayers.0.decay=paper",
            "model.blocks.0.0.decay: 'alibi' in the checkpoint, 'paper' in the config",
        ),
        ("model.layers.1.repeat=2", "model.blocks.2.0.type: None in the checkpoint, 'tnl' in the config"),
    ],
)
def test_checkpoint_of_another_model_is_refused_before_the_engine_is_built(
    fails, run, config, override, message, monkeypatch
):
    monkeypatch.setattr("megalin.train.loop.make_engine", pytest.fail)
    error = fails(CHECKPOINT, "train", config, "train.steps=14", override, "--folder", run)
    assert "step-00000012 is of another model; restore these values or start in a new run folder" in error
    assert message in error


def test_other_chunks_and_initial_weights_are_the_same_model(run, config):
    overrides = [
        "train.steps=13",
        "schedule.allow_jump=true",
        "model.init_std=0.5",
        "model.layers.0.sublayers.0.chunk_size=8",
    ]
    assert main(["train", str(config), *overrides, "--folder", str(run)]) == 0
    assert steps_saved(run)[-1] == 13


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=3", "train.seed: 0 in the checkpoint, 3 now"),
        ("train.global_batch_size=6", "train.global_batch_size: 4 in the checkpoint, 6 now"),
        ("data.sequence_length=30", "data.sequence_length: 36 in the checkpoint, 30 now"),
        ("data.isolate_documents=false", "data.isolate_documents: true in the checkpoint, false now"),
    ],
)
def test_resume_with_another_order_of_samples_is_refused(fails, run, config, override, message):
    error = fails(CONFIG, "train", config, "train.steps=14", override, "--folder", run)
    assert "was made with other values, which a run must keep" in error
    assert message in error


def test_resume_beyond_the_end_is_refused(fails, run, config):
    message = fails(CHECKPOINT, "train", config, "train.steps=6", "--folder", run)
    assert "holds 12 finished steps, train.steps is 6; raise train.steps or start in a new run folder" in message


def _flip_a_byte(checkpoint: Path) -> Path:
    largest = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-100] ^= 4
    largest.write_bytes(data)
    return largest


def test_damaged_checkpoint_is_skipped_with_a_warning(run, config, trained, caplog):
    damaged = _flip_a_byte(run / "checkpoints" / "step-00000012")
    (run / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    (run / "checkpoints" / ".tmp-step-00000014-0a0b0c0d").mkdir()
    with caplog.at_level(logging.WARNING):
        assert main(["train", str(config), "--folder", str(run)]) == 0
    assert f"{damaged}: sha256 differs from manifest.json: the file has changed" in caplog.text
    assert "step-00000010" in caplog.text
    assert "step-00000008" not in caplog.text
    warned = [line["message"] for line in _incidents(run) if line["kind"] == "warning"]
    assert warned[0].startswith(f"checkpoint skipped: {damaged.parent}: {damaged}: sha256")
    assert metrics(run) == metrics(trained)
    assert [path.name for path in (run / "checkpoints").glob(".tmp-*")] == []


def test_run_without_an_intact_checkpoint_is_not_restarted(fails, run, config):
    for step in steps_saved(run):
        _flip_a_byte(run / "checkpoints" / f"step-{step:08d}")
    message = fails(CHECKPOINT, "train", config, "--folder", run)
    assert "no valid checkpoint; restore one, or move these away to start from step 0" in message
    assert message.count("the file has changed") == 6
    assert len(losses(run)) == 12


def test_run_folder_in_use_is_refused(fails, run, config):
    with RunFolder(run):
        message = fails(CONFIG, "train", config, "train.steps=14", "--folder", run)
    assert re.search(rf"run folder .* is in use by pid {os.getpid()} on .* since .*; choose another folder", message)


def test_loss_that_is_not_finite_ends_the_run_and_publishes_nothing(fails, config, tmp_path):
    overrides = ["optimizer.lr=1e25", "checkpoint.every_steps=1"]
    message = fails(NUMERIC, "train", config, *overrides, "--folder", tmp_path / "run")
    assert re.search(r"step 2: loss .* is not finite; first in rank 0: embedding.weight", message)
    assert steps_saved(tmp_path / "run") == [1]
    assert len(losses(tmp_path / "run")) == 1
    incident = _incidents(tmp_path / "run")[-1]
    assert (incident["step"], incident["kind"]) == (1, "error")
    assert incident["message"].startswith("NumericError: step 2: loss")
