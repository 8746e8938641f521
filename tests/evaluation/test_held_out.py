"""Evaluation: nats, bits per byte and unigram entropy against values computed by hand, on any number of ranks."""

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
from megalin.data.loader import ValidationLoader
from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.evaluation.sources import SourceSuite, split_sources
from megalin.evaluation.suites import EvalOptions, evaluate_checkpoints
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.config import RunConfig, load_run_config
from megalin.train.validation import AnyEvaluation, Evaluation, TokenBytes, evaluate
from tests.model_runs import CPU, documents, model_table, train_here, write_config, write_shard
from tests.ranks import RankFailedError, run_ranks
from tests.train.test_step import MODEL


def _evaluate_uniform(prefix: Path, micro_batch_size: int, altered: str = "") -> Evaluation:
    """Evaluates a model whose logits are all zero: every label costs log(257) nats."""
    mesh = Mesh(ParallelConfig(), CPU)
    model = build_model(MODEL, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    data = DataConfig(train=["-"], validation=[str(prefix)], sequence_length=4)
    token_bytes = TokenBytes(torch.from_numpy(ByteTokenizer().token_bytes()), altered)
    recorded: list[bool] = []
    model.register_forward_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    with TokenDataset.open(data, "validation", MODEL.vocab_size) as dataset:
        loader = ValidationLoader(
            dataset, micro_batch_size=micro_batch_size, dp_rank=mesh.data.rank, dp_size=mesh.data.size
        )
        result = evaluate(model, loader, mesh, token_bytes=token_bytes)
    assert recorded
    assert not any(recorded), "a graph is recorded, whose activations an evaluation has no memory for"
    return result


def test_bits_per_byte_and_unigram_entropy_by_hand(tmp_path):
    # Windows of 4 labels: "aaba", then "c", the end of document, the next document's first (ignored), "a".
    shard = write_shard(tmp_path / "shard", [[97, 97, 97, 98, 97, 99, 256], [97, 97]])
    with process_group(CPU):
        result = _evaluate_uniform(shard, 3)
        altered = _evaluate_uniform(shard, 3, "the normalizer NFC")
    assert altered.bits_per_byte is None  # of the text, whose bytes no shard holds
    assert altered.bits_per_normalized_byte == result.bits_per_byte
    assert "evaluation_bits_per_byte" in result.metrics()
    assert altered.metrics().keys() - result.metrics().keys() == {"evaluation_bits_per_normalized_byte"}
    assert "of the text as the tokenizer alters it (the normalizer NFC)" in altered.report_lines()[-1]
    assert "bits per normalized byte" in altered.summary()
    # Labels: a a b a | c end a. Six of them are bytes; the end of document has no byte.
    assert result.tokens == 7
    assert result.loss == pytest.approx(math.log(257), rel=1e-6)
    assert result.perplexity == pytest.approx(257, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(7 * math.log2(257) / 6, rel=1e-6)
    frequencies = [4 / 7, 1 / 7, 1 / 7, 1 / 7]
    assert result.unigram_entropy == pytest.approx(-sum(value * math.log(value) for value in frequencies))


def test_evaluation_does_not_depend_on_the_ranks(tmp_path):
    shard = write_shard(tmp_path / "shard", [[97, 97, 97, 98, 97, 99, 256], [97, 97]] * 5)
    (expected,) = run_ranks(1, _evaluate_uniform, shard, 1)
    for result in run_ranks(3, _evaluate_uniform, shard, 2):
        assert result.values() == pytest.approx(expected.values(), rel=1e-9)


@pytest.mark.parametrize(
    "meshes",
    [[(2, [{}, {"tp": 2}]), (3, [{"cp": 3}])], pytest.param([(4, [{"cp": 2}])], marks=pytest.mark.slow)],
    ids=["fast", "dp2 cp2"],
)
def test_evaluation_of_a_run_on_other_ranks_is_that_of_its_training(tmp_path, meshes):
    """17 samples, a number that no batch size divides, of documents that end anywhere."""
    config = write_config(tmp_path, train={"steps": 2}, schedule={"warmup_steps": 0})
    (trained,) = run_ranks(1, _train, config, tmp_path / "run")
    for world_size, of_world in meshes:
        for results in run_ranks(world_size, _evaluate_on, tmp_path / "run", of_world):
            found = [result.values() for result in results]
            assert found == [pytest.approx(trained.values(), rel=1e-6)] * len(of_world), of_world


def test_evaluation_ignores_the_mesh_of_the_training(tmp_path):
    """32 tokens, which the three ranks of the training could not shard."""
    config = write_config(tmp_path, train={"steps": 1}, schedule={"warmup_steps": 0}, parallel={"cp": 3})
    run_ranks(3, _train, config, tmp_path / "run")
    one_rank, two_ranks = (
        run_ranks(ranks, _evaluate_saved, tmp_path / "run", {"cp": ranks}, "data.sequence_length=32")[-1]
        for ranks in (1, 2)
    )
    assert two_ranks.values() == pytest.approx(one_rank.values(), rel=1e-6)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"cp": 2}, r"data\.sequence_length = 35 is not divisible by parallel\.cp = 2; use 34 or 36"),
        ({"tp": 2}, r"intermediate_size = 45 is not divisible by parallel\.tp = 2; use tp 1\n"),
    ],
)
def test_evaluation_on_a_mesh_that_does_not_fit_is_refused(tmp_path, axes, message):
    layers = model_table()["layers"]
    layers[1]["sublayers"][1]["intermediate_size"] = 45
    config = write_config(tmp_path, model={"layers": layers}, train={"steps": 1}, schedule={"warmup_steps": 0})
    run_ranks(1, _train, config, tmp_path / "run")
    with pytest.raises(RankFailedError, match=message):
        run_ranks(2, _evaluate_saved, tmp_path / "run", axes, "data.sequence_length=35")


def _train(config: Path, folder: Path) -> Any:
    return train_here(config, folder).evaluation


def _evaluate_on(folder: Path, meshes: list[dict[str, int]]) -> list[AnyEvaluation]:
    return [_evaluate_saved(folder, axes) for axes in meshes]


def _evaluate_saved(folder: Path, axes: dict[str, int], *overrides: str) -> AnyEvaluation:
    mesh = Mesh(ParallelConfig(**axes), CPU)
    (results,) = evaluate_checkpoints(folder, mesh, overrides, EvalOptions(), lambda *_: None).values()
    assert results.loss is not None
    return results.loss


Losses = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def sources_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run with two validation shards of different text, and a third that fills no sample."""
    folder = tmp_path_factory.mktemp("sources")
    other = [[255 - token if token < 256 else token for token in text] for text in documents(300, seed=3)]
    shards = [write_shard(folder / name, text) for name, text in (("other", other), ("short", [[1, 2, 3]]))]
    config = write_config(folder, train={"steps": 1}, schedule={"warmup_steps": 0})
    validation = [str(folder / "data" / "validation"), *map(str, shards)]
    config.write_text(config.read_text().replace(json.dumps(validation[:1])[1:-1], json.dumps(validation)[1:-1]))
    return config


def _fp64_model(config: RunConfig, mesh: Mesh) -> Any:
    length, dtype = config.data.sequence_length, torch.float64
    return build_model(
        config.model, mesh, compute_dtype=dtype, recompute=False, compile_blocks=False, seed=0, length=length
    )


def _sources_on_mesh(config: RunConfig, axes: dict[str, Any]) -> Losses:
    mesh = Mesh(ParallelConfig(**axes), CPU)
    model = _fp64_model(config, mesh)
    suite = SourceSuite(config, "validation")
    results = {name: suite.run(name, model, mesh) for name in suite.result_names()}
    return {name: {key: metric.value for key, metric in each.metrics.items()} for name, each in results.items()}


@torch.no_grad()
def _sources_alone(config: RunConfig) -> Losses:
    """Each sample of each source by a plain forward in one process."""
    model = _fp64_model(config, Mesh(ParallelConfig(), CPU))
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


def _check_sources(sources_file: Path, world_size: int, meshes: list[dict[str, Any]]) -> None:
    config = load_run_config(sources_file, [])
    with process_group(CPU):
        expected = _sources_alone(config)
    first, second = (values["loss"] for values in expected.values())
    assert abs(first - second) > 1e-3
    for axes in meshes:
        for found in run_ranks(world_size, _sources_on_mesh, config, axes):
            assert list(found) == list(expected)
            for name, values in expected.items():
                assert found[name] == pytest.approx(values, rel=1e-12, abs=0), (axes, name)


@pytest.mark.parametrize(
    ("world_size", "axes"), [pytest.param(6, {"tp": 2, "cp": 3}, marks=pytest.mark.slow), (2, {"pp": 2})]
)
def test_losses_are_those_of_each_source_sources_alone(sources_file, world_size, axes):
    _check_sources(sources_file, world_size, [axes])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_by_source_are_the_same_on_more_meshes(sources_file, world_size):
    meshes: dict[int, list[dict[str, Any]]] = {
        1: [{}],
        2: [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}],
        3: [{}, {"cp": 3}],
        4: [{"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"cp": 4}],
    }
    _check_sources(sources_file, world_size, meshes[world_size])


def test_the_command_reports_sources_and_the_whole(sources_file, tmp_path, capsys, caplog):
    folder, prefixes = tmp_path / "run", load_run_config(sources_file, []).data.validation
    with process_group(CPU):
        train_here(sources_file, folder)
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
    value = f"{whole['sources'][prefixes[1]]['metrics']['loss']['value']:.4f}"
    for column in ("source", "tokens", "unigram entropy", prefixes[1], value):
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


def test_a_result_on_other_data_is_not_kept_as_that_of_the_runs_own_split(tmp_path):
    config, run = write_config(tmp_path), tmp_path / "run"
    foreign = write_shard(tmp_path / "data/foreign", documents(600, seed=9))
    assert main(["train", str(config), "--folder", str(run), "train.stop_after_steps=1"]) == 0
    for overrides in ([], [f"data.validation=['{foreign}']"], ["data.sequence_length=18"], ["data.workers=1"]):
        assert main(["eval", str(run), *overrides]) == 0
    (path,) = (run / "evaluations").glob("*.json")
    results = json.loads(path.read_text())["suites"]["loss"]
    assert list(results) == [
        "validation",
        f'validation with data.validation=["{foreign}"]',
        "validation with data.sequence_length=18",
    ]
    assert len({each["loss"] for each in results.values()}) == 3
