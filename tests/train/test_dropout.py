"""Runs with dropout: new masks in every epoch, a rate that may change where a run resumes, and accumulation.

Runs on other meshes, resumed runs and DeepSpeed's: tests/train/test_resume.py, tests/train/test_deepspeed.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_runs import DROPOUT, documents, losses, train_here, write_config, write_shard
from tests.ranks import run_ranks

SAMPLES, LENGTH = 4, 36


def _losses(config: Path, folder: Path, rates: list[tuple[int, float]]) -> list[float]:
    """The loss of each step of a run that stops after some steps with each rate of dropout."""
    for step, rate in rates:
        train_here(config, folder, f"train.stop_after_steps={step}", f"model.hidden_dropout={rate}")
    return losses(folder)


def _losses_of_sizes(config: Path, folder: Path) -> list[list[float]]:
    """The losses of runs with one and with four micro-batches a step."""
    folders = [folder / str(size) for size in (4, 1)]
    for size, run in zip((4, 1), folders, strict=True):
        train_here(config, run, f"train.micro_batch_size={size}", "data.validation=[]", "train.steps=4")
    return [losses(run) for run in folders]


def test_accumulation_changes_no_mask(tmp_path):
    whole, accumulated = run_ranks(1, _losses_of_sizes, write_config(tmp_path, model=DROPOUT), tmp_path)[0]
    assert len(whole) == 4
    assert accumulated == pytest.approx(whole, rel=1e-6)


def test_the_same_samples_have_other_masks_in_the_next_epoch(tmp_path):
    """A step is an epoch and changes no weight, so that without dropout the loss stays."""
    ids = [token for document in documents(200, seed=3) for token in document]
    data = {"train": [str(write_shard(tmp_path / "epoch", [ids[: SAMPLES * LENGTH + 1]]))], "validation": []}
    optimizer = {"lr": 1e-12, "weight_decay": 0.0}
    config = write_config(tmp_path, data=data, optimizer=optimizer, train={"steps": 5}, schedule={"warmup_steps": 0})
    first, second, *dropped, last = run_ranks(1, _losses, config, tmp_path / "run", [(2, 0.0), (4, 0.1), (5, 0.0)])[0]
    assert [second, last] == pytest.approx([first, first], rel=1e-6)
    assert abs(dropped[0] - first) > 1e-3
    assert abs(dropped[1] - first) > 1e-3
    assert abs(dropped[0] - dropped[1]) > 1e-3
