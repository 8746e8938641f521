"""Evaluation: nats, bits per byte and unigram entropy against values computed by hand, on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalin.data.config import DataConfig
from megalin.data.datasets.token import TokenDataset
from megalin.data.loader import ValidationLoader
from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.evaluation.suites import EvalOptions, evaluate_checkpoints
from megalin.parallel.mesh import Mesh, ParallelConfig
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.validation import AnyEvaluation, Evaluation, evaluate
from tests.model_runs import CPU, model_table, train_here, write_config, write_shard
from tests.ranks import RankFailedError, run_ranks
from tests.train.test_step import MODEL


def _evaluate_uniform(prefix: Path, micro_batch_size: int) -> Evaluation:
    """Evaluates a model whose logits are all zero: every label costs log(257) nats."""
    mesh = Mesh(ParallelConfig(), CPU)
    model = build_model(MODEL, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    data = DataConfig(train=["-"], validation=[str(prefix)], sequence_length=4)
    token_bytes = torch.from_numpy(ByteTokenizer().token_bytes())
    with TokenDataset.open(data, "validation", MODEL.vocab_size) as dataset:
        loader = ValidationLoader(
            dataset, micro_batch_size=micro_batch_size, dp_rank=mesh.data.rank, dp_size=mesh.data.size
        )
        return evaluate(model, loader, mesh, token_bytes=token_bytes)


def test_bits_per_byte_and_unigram_entropy_by_hand(tmp_path):
    # Windows of 4 labels: "aaba", then "c", the end of document, the next document's first (ignored), "a".
    shard = write_shard(tmp_path / "shard", [[97, 97, 97, 98, 97, 99, 256], [97, 97]])
    with process_group(CPU):
        result = _evaluate_uniform(shard, 3)
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
        assert result == pytest.approx(expected, rel=1e-9)


def test_evaluation_of_a_run_on_other_ranks_is_that_of_its_training(tmp_path):
    """17 samples, a number that no batch size divides, of documents that end anywhere."""
    config = write_config(tmp_path, train={"steps": 2}, schedule={"warmup_steps": 0})
    (trained,) = run_ranks(1, _train, config, tmp_path / "run")
    meshes: list[tuple[int, dict[str, int]]] = [(2, {}), (2, {"tp": 2}), (3, {"cp": 3}), (4, {"cp": 2})]
    for world_size, axes in meshes:
        for result in run_ranks(world_size, _evaluate_saved, tmp_path / "run", axes):
            assert result == pytest.approx(trained, rel=1e-6), axes


def test_evaluation_ignores_the_mesh_of_the_training(tmp_path):
    """32 tokens, which the three ranks of the training could not shard."""
    config = write_config(tmp_path, train={"steps": 1}, schedule={"warmup_steps": 0}, parallel={"cp": 3})
    run_ranks(3, _train, config, tmp_path / "run")
    one_rank, two_ranks = (
        run_ranks(ranks, _evaluate_saved, tmp_path / "run", {"cp": ranks}, "data.sequence_length=32")[-1]
        for ranks in (1, 2)
    )
    assert two_ranks == pytest.approx(one_rank, rel=1e-6)


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


def _evaluate_saved(folder: Path, axes: dict[str, int], *overrides: str) -> AnyEvaluation:
    mesh = Mesh(ParallelConfig(**axes), CPU)
    (results,) = evaluate_checkpoints(folder, mesh, overrides, EvalOptions(), lambda *_: None).values()
    assert results.loss is not None
    return results.loss
