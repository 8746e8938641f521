"""The held-out loss by source, against plain forwards of each source alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalin.__main__ import main
from megalin.data.config import DataConfig, SourceConfig
from megalin.data.datasets.token import TokenDataset
from megalin.evaluation.sources import SourceSuite, split_sources
from megalin.parallel.mesh import Mesh, ParallelConfig
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.config import RunConfig, load_run_config
from tests.model_runs import CPU, documents, train_here, write_config, write_shard
from tests.ranks import run_ranks

Losses = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run with two validation shards of different text, and a third that fills no sample."""
    folder = tmp_path_factory.mktemp("sources")
    other = [[255 - token if token < 256 else token for token in text] for text in documents(300, seed=3)]
    shards = [write_shard(folder / name, text) for name, text in (("other", other), ("short", [[1, 2, 3]]))]
    config = write_config(folder, train={"steps": 1}, schedule={"warmup_steps": 0})
    validation = [str(folder / "data" / "validation"), *map(str, shards)]
    config.write_text(config.read_text().replace(json.dumps(validation[:1])[1:-1], json.dumps(validation)[1:-1]))
    return config


def _model(config: RunConfig, mesh: Mesh) -> Any:
    length, dtype = config.data.sequence_length, torch.float64
    return build_model(
        config.model, mesh, compute_dtype=dtype, recompute=False, compile_blocks=False, seed=0, length=length
    )


def _on_mesh(config: RunConfig, axes: dict[str, Any]) -> Losses:
    mesh = Mesh(ParallelConfig(**axes), CPU)
    model = _model(config, mesh)
    suite = SourceSuite(config, "validation")
    results = {name: suite.run(name, model, mesh) for name in suite.result_names()}
    return {name: {key: metric.value for key, metric in each.metrics.items()} for name, each in results.items()}


@torch.no_grad()
def _alone(config: RunConfig) -> Losses:
    """Each sample of each source by a plain forward in one process."""
    model = _model(config, Mesh(ParallelConfig(), CPU))
    found: Losses = {}
    for prefix in config.data.validation[:2]:
        losses, labels = [], []
        data = config.data.model_copy(update={"validation": [prefix]})
        with TokenDataset.open(data, "validation", config.model.vocab_size) as dataset:
            for number in range(dataset.num_samples):
                batch = dataset.batch(np.array([number]))
                output = model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids)
                losses += output.token_losses[batch.labels != -100].tolist()
                labels += batch.labels[batch.labels != -100].tolist()
        loss = sum(losses) / len(losses)
        frequencies = np.unique(labels, return_counts=True)[1] / len(labels)
        found[prefix] = {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": sum(losses) / math.log(2) / sum(label < 256 for label in labels),
            "unigram_entropy": -(frequencies * np.log(frequencies)).sum(),
        }
    return found


def _check(config_file: Path, world_size: int, meshes: list[dict[str, Any]]) -> None:
    config = load_run_config(config_file, [])
    with process_group(CPU):
        expected = _alone(config)
    first, second = (values["loss"] for values in expected.values())
    assert abs(first - second) > 1e-3
    for axes in meshes:
        for found in run_ranks(world_size, _on_mesh, config, axes):
            assert list(found) == list(expected)
            for name, values in expected.items():
                assert found[name] == pytest.approx(values, rel=1e-12, abs=0), (axes, name)


@pytest.mark.parametrize(("world_size", "axes"), [(6, {"tp": 2, "cp": 3}), (2, {"pp": 2})])
def test_losses_are_those_of_each_source_alone(config_file, world_size, axes):
    _check(config_file, world_size, [axes])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_by_source_are_the_same_on_more_meshes(config_file, world_size):
    meshes: dict[int, list[dict[str, Any]]] = {
        1: [{}],
        2: [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}],
        3: [{}, {"cp": 3}],
        4: [{"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"cp": 4}],
    }
    _check(config_file, world_size, meshes[world_size])


def test_the_command_reports_sources_and_the_whole(config_file, tmp_path, capsys, caplog):
    folder, prefixes = tmp_path / "run", load_run_config(config_file, []).data.validation
    with process_group(CPU):
        train_here(config_file, folder)
    capsys.readouterr()

    def printed(*arguments: str) -> dict[str, Any]:
        assert main(["eval", str(folder), *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    whole = printed()
    assert f"left out of the losses by source: {prefixes[2]}: {prefixes[2]}: data.sequence_length = 36 needs" in (
        caplog.text
    )
    assert list(whole["sources"]) == prefixes[:2]
    for prefix in prefixes[:2]:
        alone = printed(f"data.validation=['{prefix}']")
        assert "sources" not in alone
        assert whole["sources"][prefix]["num_questions"] == alone.pop("tokens")
        found = {name: metric["value"] for name, metric in whole["sources"][prefix]["metrics"].items()}
        assert found == alone
        assert abs(alone["loss"] - whole["loss"]) > 1e-3
    assert printed()["sources"] == whole["sources"]  # seconds too: nothing ran again
    assert main(["eval", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "perplexity" in text
    for column in ("source", "tokens", "unigram entropy", prefixes[1]):
        assert column in text.split("\n", 4)[-1], column


def test_sources_have_the_names_of_the_training_sources_that_they_are_held_out_of():
    sources = [SourceConfig(name="web", paths=["a", "b"]), SourceConfig(name="code", paths=["c"])]
    held_out = DataConfig(sources=sources, validation_fraction=0.1, sequence_length=4)
    assert split_sources(held_out, "validation") == {"web": ["a", "b"], "code": ["c"]}
    own = DataConfig(sources=sources, validation=["d", "e"], sequence_length=4)
    assert split_sources(own, "validation") == {"d": ["d"], "e": ["e"]}
    assert split_sources(own, "train") == {"web": ["a", "b"], "code": ["c"]}
    assert split_sources(DataConfig(train=["a", "b"], split=[8, 1, 1], sequence_length=4), "test") == {
        "a": ["a"],
        "b": ["b"],
    }
