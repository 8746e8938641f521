"""A tiny run of an encoder that classifies: equal on any mesh, exact resumption, evaluation, and refused configs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from megalin.__main__ import main
from megalin.data.batch import pad_samples, take_samples
from megalin.data.shards.supervised import write_supervised_shard
from megalin.errors import ConfigError
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.config import load_run_config
from megalin.train.loop import TrainResult
from megalin.train.validation import evaluate
from tests.encoder_cases import CASES, CLASSES, build, make_batch
from tests.model_runs import checkpoint_tensors, train_here
from tests.ranks import run_ranks

METRICS = ("step", "loss", "label_tokens", "grad_norm")
FIRST, SEPARATOR = 20, 19


def shard(prefix: Path, count: int, *, seed: int) -> str:
    """Documents of 4 to 24 ids below 16, a separator, and the class: the number of ids above 7, modulo 3."""
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        ids = generator.integers(0, 16, generator.integers(4, 25))
        ids = np.array([*ids, SEPARATOR, FIRST + (ids > 7).sum() % 3])
        documents.append((ids, np.arange(len(ids)) == len(ids) - 1))
    write_supervised_shard(prefix, documents, vocab_size=23)
    return str(prefix)


def write_config(folder: Path) -> Path:
    norm = {"norm": "layernorm", "norm_eps": 1e-5}
    sublayers = [
        {"type": "two_way_hgrn2", "num_heads": 4, "chunk_size": 16},
        {"type": "bidirectional_softmax", "num_heads": 2, **norm},
        {"type": "ffn", "intermediate_size": 24, **norm},
    ]
    values: dict[str, dict[str, Any]] = {
        "model": {
            "kind": "encoder",
            "vocab_size": 23,
            "hidden_size": 16,
            "max_positions": 24,
            "init_std": 0.1,
            "num_classes": 3,
            "pooling": "mean",
            "layers": [{"sublayers": sublayers}],
        },
        "data": {
            "train": [shard(folder / "train", 60, seed=1)],
            "validation": [shard(folder / "validation", 21, seed=2)],
            "sequence_length": 24,
            "classification": {"first_class_id": FIRST, "num_classes": 3, "separator_tokens": 1},
        },
        "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"lr": 3e-3, "max_grad_norm": 1.0},
        "checkpoint": {"every_steps": 6},
    }
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_alone(*arguments: Any) -> TrainResult:
    """`train_here` in this process."""
    with process_group(torch.device("cpu")):
        return train_here(*arguments)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """Folder and result of a run on one rank."""
    folder = tmp_path_factory.mktemp("one_rank")
    whole = train_alone(write_config(folder), folder / "one")
    assert [line["label_tokens"] for line in lines(folder / "one")] == [8] * 4
    return folder / "one", whole


TP = ["parallel.tp=2", "parallel.sequence_parallel=true", "train.recompute=true"]


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [(3, ["parallel.cp=3"]), pytest.param(4, TP, marks=pytest.mark.slow)],
    ids=["cp3", "tp2dp2"],
)
def test_run_is_the_same_on_every_mesh(one_rank, tmp_path, world_size, overrides):
    folder, whole = one_rank
    result = run_ranks(world_size, train_here, write_config(tmp_path), tmp_path / "run", *overrides)[-1]
    for line, truth in zip(lines(tmp_path / "run"), lines(folder), strict=True):
        assert {key: line[key] for key in METRICS} == pytest.approx({key: truth[key] for key in METRICS}, rel=2e-4)
    assert result.evaluation._asdict() == pytest.approx(whole.evaluation._asdict(), rel=2e-3, abs=2e-3)


def test_interrupted_run_goes_on_bit_for_bit(one_rank, tmp_path):
    folder, _ = one_rank
    config = folder.parent / "tiny.toml"
    train_alone(config, tmp_path / "parts", "train.stop_after_steps=2")
    train_alone(config, tmp_path / "parts")
    for line, truth in zip(lines(tmp_path / "parts"), lines(folder), strict=True):
        assert {key: line[key] for key in METRICS} == {key: truth[key] for key in METRICS}
    parts, whole = checkpoint_tensors(tmp_path / "parts"), checkpoint_tensors(folder)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_evaluation_is_in_the_metrics_and_in_the_command(one_rank, capsys):
    folder, whole = one_rank
    last, evaluation = lines(folder)[-1], whole.evaluation._asdict()
    names = ("loss", "accuracy", "sequences")
    assert {name: last[f"evaluation_{name}"] for name in names} == {name: evaluation[name] for name in names}
    assert evaluation["sequences"] == 21
    assert main(["eval", str(folder), "--suite", "loss", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(evaluation, rel=1e-5)
    assert main(["eval", str(folder)]) == 0
    assert f"accuracy      {evaluation['accuracy']:.2%}" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    assert "nats a sequence" in (folder / "report.html").read_text()


def test_other_classes_are_other_samples(one_rank, tmp_path):
    folder, _ = one_rank
    config = folder.parent / "tiny.toml"
    shutil.copytree(folder, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"data\.classification\.first_class_id: 20 in the checkpoint, 19 now"):
        train_alone(config, tmp_path / "run", "train.steps=6", "data.classification.first_class_id=19")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.classification.num_classes=2", "data.classification.num_classes = 2 differs from model.num_classes = 3"),
        ("data.classification.first_class_id=21", "ids up to 23, but model.vocab_size = 23; raise it to 24"),
        ("data.classification.first=2", "data.classification.first: unknown key"),
        ("data.sequence_length=30", "data.sequence_length = 30 is more than model.max_positions = 24"),
    ],
)
def test_configs_that_do_not_fit_are_refused(one_rank, override, message):
    with pytest.raises(ConfigError, match=message):
        load_run_config(one_rank[0].parent / "tiny.toml", [override])


def test_samples_with_classes_need_a_model_that_classifies(one_rank, tmp_path):
    text = (one_rank[0].parent / "tiny.toml").read_text()
    (tmp_path / "a.toml").write_text(text.replace("num_classes = 3\npooling", "pooling"))
    with pytest.raises(ConfigError, match=r"samples with a class, but model.num_classes is missing; set it to 3"):
        load_run_config(tmp_path / "a.toml", [])
    with pytest.raises(ConfigError, match=r'makes samples for an encoder, but model.kind = "decoder"'):
        load_run_config(tmp_path / "a.toml", ["model={preset = 'tnl-70m'}"])


def _evaluated() -> tuple[dict[str, float], dict[str, float]]:
    """Results of `evaluate` on two batches, one of them with padding samples, and the same computed by hand."""
    mesh = Mesh(ParallelConfig(), torch.device("cpu"))
    (config,) = (case.model for case in CASES if case.name == "classes")
    options = {"compute_dtype": torch.float64, "recompute": False, "compile_blocks": False, "seed": 0}
    batches = [make_batch(config), pad_samples(take_samples(make_batch(config, seed=8), slice(0, 2)), 4)]
    found = evaluate(build_model(config, mesh, **options), batches, mesh)._asdict()
    labels, losses, right = [], [], []
    for batch in batches:
        output = build(config)(**batch.inputs())
        for label, logits in zip(batch.sequence_labels.tolist(), output.sequence_logits, strict=True):
            if label >= 0:
                labels.append(label)
                losses.append(logits.logsumexp(0).item() - logits[label].item())
                right.append(logits.argmax().item() == label)
    shares = [labels.count(number) / len(labels) for number in range(CLASSES) if number in labels]
    expected = {
        "loss": sum(losses) / len(losses),
        "accuracy": sum(right) / len(right),
        "majority": max(shares),
        "class_entropy": -sum(share * math.log(share) for share in shares),
        "sequences": 5,
    }
    return found, expected


def test_evaluation_counts_each_sequence_once():
    with process_group(torch.device("cpu")):
        found, expected = _evaluated()
    assert found == pytest.approx(expected, rel=1e-10)
