"""A tiny training run for the tests of the trainer and the commands: its shards, config file and output files."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tomli_w
import torch
from torch import Tensor

from megalin.checkpoint.index import DTYPES
from megalin.checkpoint.load import load, newest
from megalin.data.shards.indexed_dataset import ShardWriter
from megalin.train.config import load_run_config
from megalin.train.launch_checks import check_launch
from megalin.train.loop import TrainResult, train
from megalin.train.step import LaunchedStep
from megalin.train.tasks import TaskRunner
from megalin.train.update_hooks import UpdateHook

STEPS = 12
DROPOUT = {"embedding_dropout": 0.05, "hidden_dropout": 0.1}
CPU = torch.device("cpu")
EXACT = (
    *("step", "loss", "grad_norm", "learning_rate", "tokens", "flops", "label_tokens", "evaluation_loss"),
    *("loss_scale", "skipped", "spike"),
)
"""Metrics that depend on the config alone."""


def write_shard(prefix: Path, documents: Sequence[Sequence[int]]) -> Path:
    """Writes a uint16 shard, one sequence a document."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(str(prefix), np.dtype("uint16")) as writer:
        for document in documents:
            writer.add_sequence(np.asarray(document, np.uint16))
            writer.end_document()
        writer.publish()
    return prefix


def documents(num_tokens: int, *, seed: int) -> list[list[int]]:
    """Documents of 5 to 60 bytes that a model learns to predict in a few steps: each counts up by its stride."""
    generator = np.random.default_rng(seed)
    made: list[list[int]] = []
    while sum(map(len, made)) < num_tokens:
        start, stride, length = (int(generator.integers(*ends)) for ends in ((0, 40), (1, 4), (5, 60)))
        made.append([(start + stride * place) % 64 for place in range(length)] + [256])
    return made


def model_table() -> dict[str, Any]:
    """Two blocks of different mixers; the sequence is no multiple of the chunk, one low-rank weight is replicated."""
    return {
        "vocab_size": 257,
        "hidden_size": 32,
        "init_std": 0.1,
        "embedding_scale": 4.0,
        "layers": [
            {
                "sublayers": [
                    {"type": "transnormer", "num_heads": 4, "lrpe": "cosine", "chunk_size": 16},
                    {"type": "glu", "intermediate_size": 48},
                ]
            },
            {
                "sublayers": [
                    {"type": "tnl", "num_heads": 4, "chunk_size": 16},
                    {"type": "glu", "intermediate_size": 48, "activation": "silu"},
                ]
            },
        ],
    }


def write_config(folder: Path, **tables: dict[str, Any]) -> Path:
    """Writes shards and the config file of a 12-step run; `tables` add or replace keys of the config's tables."""
    train_prefix = write_shard(folder / "data" / "train", documents(3000, seed=1))
    validation_prefix = write_shard(folder / "data" / "validation", documents(600, seed=2))
    values: dict[str, dict[str, Any]] = {
        "model": model_table(),
        "data": {
            "train": [str(train_prefix)],
            "validation": [str(validation_prefix)],
            "sequence_length": 36,
            "tokenizer": "bytes",
        },
        "train": {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-2, "max_grad_norm": 1.0},
        "schedule": {"warmup_steps": 3},
        "parallel": {},
        "checkpoint": {"every_steps": STEPS // 2},
        "evaluation": {},
    }
    for name, table in tables.items():
        values[name] |= table
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def train_here(
    config: Path,
    folder: Path,
    *overrides: str,
    hooks: Sequence[UpdateHook] = (),
    tasks: TaskRunner | None = None,
    loss_curve: bool = False,
    device: torch.device = CPU,
) -> TrainResult:
    """Trains in the process group of this process, as `megalin train` does; run_ranks can call it. By default it draws
    no loss curve, which takes a third of the time."""
    gc.freeze()  # as in a process with one run: garbage collection skips the objects of other runs
    run_config = load_run_config(config, list(overrides))
    check_launch(run_config, torch.distributed.get_world_size())
    with nullcontext() if loss_curve else patch("megalin.train.loop.write_loss_curve"):
        return train(run_config, device, folder, hooks=hooks, tasks=tasks)


@contextmanager
def late_results() -> Iterator[None]:
    """Results that, as on a GPU, are not ready before they are waited for."""
    with patch.object(LaunchedStep, "is_ready", property(lambda _: False, lambda *_: None), create=True):
        yield


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, reduced to the EXACT metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in EXACT if name in line} for line in lines]


def ledger(folder: Path) -> list[dict[str, Any]]:
    """The lines of ledger.jsonl."""
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """The training loss of each step."""
    return [line["loss"] for line in metrics(folder)]


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, unsharded."""
    checkpoint = newest(folder / "checkpoints")
    assert checkpoint is not None, folder
    records = checkpoint.index().tensors
    tensors = {name: torch.zeros(record.shape, dtype=DTYPES[record.dtype]) for name, record in records.items()}
    load(checkpoint, tensors)
    return tensors


def steps_saved(folder: Path) -> list[int]:
    """The steps of the published checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
