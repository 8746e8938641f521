"""Runs from Python: the trainer, the model and tokenizer of a run, and batches for training loops of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megalin
from megalin.__main__ import main
from megalin.errors import CheckpointError, ConfigError
from megalin.parallel.process_group import process_group
from megalin.train.config import RunConfig
from tests.model_runs import CPU, checkpoint_tensors, losses, write_config

STEPS = 4


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The config of a tiny run, as a dict."""
    path = write_config(tmp_path_factory.mktemp("config"), train={"steps": STEPS}, checkpoint={"every_steps": 2})
    return tomllib.loads(path.read_text())


@pytest.fixture(scope="module")
def trained(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of this config; read-only. It forks nothing."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", None)
        patch.setattr("megalin.train.loop.write_loss_curve", lambda *_, **__: None)  # takes a third of the time
        trainer = megalin.Trainer(values, folder)
        result = trainer.train()
    assert (result.step, trainer.folder) == (STEPS, folder)
    assert result.loss == losses(folder)[-1]
    assert not torch.distributed.is_initialized()
    return folder


def test_a_second_call_has_nothing_left_to_do(trained: Path):
    """The folder's own config file is a source too."""
    result = megalin.Trainer(trained / "config.toml", trained).train()
    assert (result.step, result.loss) == (STEPS, None)


def test_a_file_names_its_folder_and_a_dict_gets_a_new_one(values: dict[str, Any], trained: Path, monkeypatch):
    trainer = megalin.Trainer(str(trained / "config.toml"))
    assert trainer.folder == Path("runs/config")
    new = megalin.Trainer(values).folder
    assert new.parent == Path("runs")
    assert new.name.startswith("20")
    assert megalin.Trainer(trainer.config, "there").folder == Path("there")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="folder is missing: the ranks of a launcher need one run folder"):
        megalin.Trainer(values)


def test_trainer_refuses(values: dict[str, Any], tmp_path: Path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"(?s)the run's config: 2 problem.*model.hidden_siz: unknown key.*train.step"
    ):
        megalin.Trainer(values | {"model": values["model"] | {"hidden_siz": 3}, "train": values["train"] | {"step": 3}})
    with pytest.raises(ConfigError, match=r"3 is no run's config; give a RunConfig, a dict, or the path"):
        megalin.Trainer(3)  # type: ignore[arg-type]
    launch = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    sharded = megalin.Trainer(values | {"parallel": {"tp": 8}}, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"num_heads = 4.* not divisible by parallel\.tp = 8"):
        sharded.train()
    monkeypatch.undo()
    with process_group(CPU), pytest.raises(ConfigError, match="has a process group already, but Trainer makes its own"):
        megalin.Trainer(values, tmp_path / "run").train()
    assert not (tmp_path / "run").exists()


def test_loaded_model_is_the_one_that_eval_reads(values: dict[str, Any], trained: Path, capsys):
    model = megalin.load(trained)
    saved = checkpoint_tensors(trained)
    weights = dict(model.language_model.named_parameters())
    assert [name for name, weight in weights.items() if not torch.equal(weight, saved[name])] == []
    assert main(["eval", str(trained), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    total, count = 0.0, 0
    with megalin.datasets.open_split(values["data"], "validation", vocab_size=257) as dataset, torch.no_grad():
        for batch in megalin.datasets.ValidationLoader(dataset, micro_batch_size=2):
            valid = int((batch.labels != -100).sum())
            loss = model(batch.tokens, targets=batch.labels, document_ids=batch.document_ids).loss
            total, count = total + valid * loss.item(), count + valid
    assert total / count == pytest.approx(expected, rel=1e-6)
    assert not model.training


def test_loaded_model_generates_text_and_loads_other_steps(trained: Path, capsys):
    model = megalin.load(trained)
    command = ["generate", str(trained), "--prompt", "!#%", "--max-tokens", "8", "--seed", "3"]
    assert main(command) == 0
    assert capsys.readouterr().out == "!#%" + model.generate("!#%", max_tokens=8, seed=3) + "\n"
    assert len(model.generate(["!#%", "'"], max_tokens=8)) == 2
    earlier = megalin.load(str(trained), step=2, dtype="bfloat16")
    assert not torch.equal(earlier.language_model.embedding.weight.float(), model.language_model.embedding.weight)
    assert earlier.language_model.embedding.weight.dtype == torch.bfloat16


def test_load_refuses(trained: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent: not a run folder, it has no config\.toml; give one that"):
        megalin.load(tmp_path / "absent")
    (tmp_path / "config.toml").write_text((trained / "config.toml").read_text())
    with pytest.raises(CheckpointError, match="the run has no checkpoint yet; train it first"):
        megalin.load(tmp_path)
    with pytest.raises(CheckpointError, match="step"):
        megalin.load(trained, step=3)


def test_batches_are_those_of_the_run(values: dict[str, Any], trained: Path):
    """Losses of a plain loop over the first steps: those of the run, whose schedule and optimizer it repeats."""
    config: RunConfig = megalin.Trainer(values).config
    model = megalin.build_model(values, device="cpu")
    found = []
    with megalin.datasets.open_split(config.data, vocab_size=257) as dataset:
        loop = megalin.datasets.batches(dataset, config.train.global_batch_size, steps=1)
        for batch in loop:
            output = model(batch.tokens, targets=batch.labels, document_ids=batch.document_ids)
            found.append(output.loss.item())
        later = next(megalin.datasets.batches(dataset, 4, steps=1, first_step=2))
        third = list(megalin.datasets.batches(dataset, 4, steps=3))[2]
        assert torch.equal(later.tokens, third.tokens)
        epoch = [each.sample_ids for each in megalin.datasets.batches(dataset, 1, steps=dataset.num_samples, seed=5)]
        assert np.unique(torch.cat(epoch)).size == dataset.num_samples
    assert found == pytest.approx(losses(trained)[:1], rel=1e-6)
    with pytest.raises(ConfigError, match="split = 'test': the config has none"):
        megalin.datasets.open_split(config.data, "test", vocab_size=257)
    with pytest.raises(ConfigError, match=r'data\.order = "megatron": only runs have this order'):
        megalin.datasets.open_split(values["data"] | {"order": "megatron"}, vocab_size=257)
    with pytest.raises(ConfigError, match="the data's config: 1 problem"):
        megalin.datasets.open_split(values["data"] | {"sequence_len": 3}, vocab_size=257)


@pytest.mark.slow
def test_trainer_in_a_script_of_torchrun(values: dict[str, Any], trained: Path, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, megalin\n"
        "config = json.load(open(sys.argv[1]))\n"
        "print(megalin.Trainer(config, sys.argv[2]).train().step)\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(values | {"parallel": {"tp": 2}}))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    command += [str(tmp_path / "config.json"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == [f"{STEPS}"] * 2
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=1e-4)
