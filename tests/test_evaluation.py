"""Evaluation: nats, bits per byte and unigram entropy by hand, on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megalin.data.config import DataConfig
from megalin.data.dataset import TokenDataset
from megalin.data.loader import ValidationLoader
from megalin.data.tokenizer import ByteTokenizer
from megalin.evaluation import evaluate_run
from megalin.parallel.mesh import Mesh, ParallelConfig, process_group
from megalin.train.build import build_model
from megalin.train.evaluate import Evaluation, evaluate
from tests.model_runs import CPU, train_here, write_config, write_shard
from tests.ranks import run_ranks
from tests.train.test_step import MODEL


def _evaluate_uniform(prefix: Path, micro_batch_size: int) -> Evaluation:
    """A model whose logits are all zero: every label costs log(257) nats."""
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
    # Windows of 4 labels: "aaba", then "c", the end, (ignored: the next document's first), "a".
    shard = write_shard(tmp_path / "shard", [[97, 97, 97, 98, 97, 99, 256], [97, 97]])
    with process_group(CPU):
        result = _evaluate_uniform(shard, 3)
    # Labels: a a b a | c end a; of these six are bytes, the end is none.
    assert result.tokens == 7
    assert result.loss == pytest.approx(math.log(257), rel=1e-6)
    assert result.perplexity == pytest.approx(257, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(7 * math.log2(257) / 6, rel=1e-6)
    shares = [4 / 7, 1 / 7, 1 / 7, 1 / 7]
    assert result.unigram_entropy == pytest.approx(-sum(share * math.log(share) for share in shares))


def test_evaluation_does_not_depend_on_the_ranks(tmp_path):
    shard = write_shard(tmp_path / "shard", [[97, 97, 97, 98, 97, 99, 256], [97, 97]] * 5)
    (expected,) = run_ranks(1, _evaluate_uniform, shard, 1)
    for result in run_ranks(3, _evaluate_uniform, shard, 2):
        assert result == pytest.approx(expected, rel=1e-9)


def test_evaluation_of_a_run_on_other_ranks_is_that_of_its_training(tmp_path):
    config = write_config(tmp_path, train={"steps": 2}, schedule={"warmup_steps": 0})
    (trained,) = run_ranks(1, _train, config, tmp_path / "run")
    for result in run_ranks(2, _evaluate_saved, tmp_path / "run"):
        assert result == pytest.approx(trained, rel=1e-6)


def _train(config: Path, folder: Path) -> Any:
    return train_here(config, folder).evaluation


def _evaluate_saved(folder: Path) -> Evaluation:
    return evaluate_run(folder, Mesh(ParallelConfig(), CPU))
