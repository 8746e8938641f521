"""The loss by position, against plain forwards of every sample."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megalin.__main__ import main
from megalin.data.shards.indexed_dataset import bin_path
from megalin.data.sources import open_dataset
from megalin.errors import ConfigError
from megalin.evaluation.positions import PositionSuite, bucket_edges, places_in_documents
from megalin.evaluation.suite import TaskResult
from megalin.model.language_model import LanguageModel
from megalin.parallel.config import ParallelConfig
from megalin.parallel.initialisation import init_weights
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.config import RunConfig, load_run_config
from tests.model_runs import CPU, train_here, write_config
from tests.ranks import run_ranks

LENGTH = 144
LENGTHS = f"data.sequence_length={LENGTH}"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("positions"))


def _on_mesh(config: RunConfig, axes: dict[str, int]) -> TaskResult:
    mesh = Mesh(ParallelConfig(**axes), CPU)
    model: Any = build_model(
        config.model, mesh, compute_dtype=torch.float64, recompute=False, compile_blocks=False, seed=0, length=LENGTH
    )
    suite = PositionSuite(config, limit=3)
    return suite.run(*suite.result_names(), model, mesh)


@torch.no_grad()
def _alone(config: RunConfig) -> dict[str, float]:
    """Each of three samples by a plain forward in fp64; every label's earlier tokens are counted one by one."""
    model = LanguageModel(config.model)
    model.to_empty(device=CPU)
    init_weights(model, 0)
    model.double()
    losses: dict[str, list[float]] = {"loss": []}
    with open_dataset(config.data, "validation", config.model.vocab_size, config.train.seed) as dataset:
        for number in range(3):
            batch: Any = dataset.batch(torch.tensor([number]).numpy())
            output = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
            ids, earlier = batch.document_ids[0].tolist(), 0
            for place, label in enumerate(batch.labels[0].tolist()):
                earlier = earlier + 1 if place and ids[place] == ids[place - 1] else 0
                if label != -100:
                    name = "0-63" if earlier < 64 else "64-127" if earlier < 128 else "128-143"
                    losses["loss"].append(output.token_losses[0, place].item())
                    losses.setdefault(name, []).append(losses["loss"][-1])
    return {name: sum(values) / len(values) for name, values in losses.items()}


@pytest.mark.parametrize(("ranks", "axes"), [(1, {}), (3, {"cp": 3})])
@pytest.mark.parametrize("isolated", [True, False])
def test_losses_are_those_of_plain_forwards(config_file, ranks, axes, isolated):
    config = load_run_config(config_file, [LENGTHS, f"data.isolate_documents={str(isolated).lower()}"])
    expected = _alone(config)
    assert ("128-143" in expected) is not isolated  # the documents are shorter
    for result in run_ranks(ranks, _on_mesh, config, axes):
        found = {name: metric.value for name, metric in result.metrics.items()}
        assert found == pytest.approx(expected, rel=1e-9)
        assert result.num_questions == sum(result.details["labels"])


def test_places_count_from_the_start_of_each_document():
    ids = torch.tensor([[0, 0, 0, 1, 2, 2], [5, 5, 5, 5, 5, 5]])
    assert places_in_documents(ids).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_buckets_double():
    assert bucket_edges(512) == [0, 64, 128, 256]
    assert bucket_edges(513) == [0, 64, 128, 256, 512]
    assert bucket_edges(10) == [0]


def test_the_command_agrees_with_the_held_out_loss(config_file, tmp_path, capsys):
    with process_group(CPU):
        train_here(config_file, tmp_path / "run", "train.stop_after_steps=1")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), LENGTHS, "--suite", "loss,positions", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["1"]
    found = printed["positions"]["validation"]
    assert found["metrics"]["loss"]["value"] == pytest.approx(printed["loss"]["loss"], rel=1e-5)
    assert found["num_questions"] == printed["loss"]["tokens"]
    assert main(["eval", str(tmp_path / "run"), LENGTHS, "--suite", "positions"]) == 0
    assert "0-63" in capsys.readouterr().out


def test_a_shard_that_changed_is_evaluated_again(config_file):
    config = load_run_config(config_file, [])
    suite = PositionSuite(config)
    (name,) = suite.result_names()
    before = suite.settings(name)
    assert suite.settings(name) == before
    path = bin_path(config.data.paths("validation")[0])
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert suite.settings(name) != before


def test_bad_input_is_refused(config_file):
    config = load_run_config(config_file, [])
    with pytest.raises(ConfigError, match=r"the suite positions reads data\.test, which the run does not have"):
        PositionSuite(config, split="test")
    with pytest.raises(ConfigError, match="limit = 0 leaves no sample"):
        PositionSuite(config, limit=0)
