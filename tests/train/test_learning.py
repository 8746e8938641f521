"""Training on associative recall across chunks, which a model without a state cannot learn."""

from __future__ import annotations

import math

import pytest
import torch

from megalin.config import parse
from megalin.data.batch import Batch
from megalin.model.config import ModelConfig
from megalin.optim.adamw import build_optimizer, set_learning_rate
from megalin.optim.config import OptimizerConfig, ScheduleConfig
from megalin.optim.schedule import learning_rate
from megalin.parallel.config import ParallelConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.step import train_step
from megalin.train.validation import evaluate
from tests.model_runs import CPU

KEYS, VALUES, PAIRS, CHUNK = 8, 8, 4, 4
STEPS, BATCH = 400, 32
STATELESS_ENTROPY = math.log(VALUES)
"""Nats an answer. Values are drawn independently and uniformly for every sequence, and neither keys nor queries repeat
in one, so queries without the pairs say nothing about the answer. Pairs and queries are in different chunks."""
MODEL = {
    "vocab_size": KEYS + VALUES,
    "hidden_size": 32,
    "embedding_scale": 32**0.5,
    "init_std": 0.05,
    "tie_embeddings": False,
    "layers": [
        {
            "sublayers": [
                {"type": "transnormer", "num_heads": 4, "lrpe": "cosine", "chunk_size": CHUNK},
                {"type": "glu", "intermediate_size": 64},
            ],
            "repeat": 2,
        }
    ],
}


def recall_batch(generator: torch.Generator, num_samples: int) -> Batch:
    """Sequences `k1 v1 .. k4 v4` in two chunks, then the keys in another order with their values, the labels."""
    keys = torch.rand(num_samples, KEYS, generator=generator).argsort(1)[:, :PAIRS]  # [B, PAIRS]
    values = torch.randint(KEYS, KEYS + VALUES, (num_samples, PAIRS), generator=generator)
    order = torch.rand(num_samples, PAIRS, generator=generator).argsort(1)
    asked = [keys.gather(1, order), values.gather(1, order)]
    sequence = torch.cat([torch.stack([keys, values], -1).flatten(1), torch.stack(asked, -1).flatten(1)], 1)
    labels = torch.full_like(sequence[:, 1:], IGNORED_LABEL)
    labels[:, 2 * PAIRS :: 2] = sequence[:, 2 * PAIRS + 1 :: 2]
    documents = torch.zeros_like(labels, dtype=torch.int32)
    return Batch(sequence[:, :-1].contiguous(), labels, documents, torch.arange(num_samples))


def test_pairs_and_queries_share_no_chunk_and_answers_are_even():
    batch = recall_batch(torch.Generator().manual_seed(1), 4000)
    asked = (batch.labels != IGNORED_LABEL).any(0).nonzero().flatten()
    assert asked.min() // CHUNK > (2 * PAIRS - 1) // CHUNK
    answers = batch.labels[batch.labels != IGNORED_LABEL]
    queries = batch.tokens[batch.labels != IGNORED_LABEL]
    joint = torch.bincount(queries * VALUES + answers - KEYS, minlength=KEYS * VALUES).view(KEYS, VALUES) / len(answers)
    conditional = -(joint * (joint / joint.sum(1, keepdim=True)).log()).sum()
    assert conditional.item() == pytest.approx(STATELESS_ENTROPY, abs=5e-3)


@pytest.mark.slow
def test_associative_recall_is_learned_far_below_what_a_stateless_model_can_reach():
    generator = torch.Generator().manual_seed(0)
    config, schedule = OptimizerConfig(lr=1e-2, weight_decay=0.0), ScheduleConfig(warmup_steps=20, min_lr_ratio=0.05)
    with process_group(CPU):
        mesh = Mesh(ParallelConfig(), CPU)
        model = build_model(
            parse(ModelConfig, MODEL, "test"),
            mesh,
            compute_dtype=torch.float32,
            recompute=False,
            compile_blocks=False,
            seed=0,
        )
        optimizer = build_optimizer(model, config, no_decay=model.no_decay_names())
        losses = []
        for step in range(STEPS):
            set_learning_rate(optimizer, learning_rate(config, schedule, step, STEPS))
            batches = [recall_batch(generator, BATCH)]
            losses.append(train_step(model, optimizer, batches, mesh, max_grad_norm=1.0, step=step).wait().loss)
        held_out = evaluate(model, [recall_batch(generator, 500)], mesh)
    assert losses[0] > STATELESS_ENTROPY - 0.1
    assert held_out.tokens == 500 * PAIRS
    assert held_out.unigram_entropy == pytest.approx(STATELESS_ENTROPY, abs=0.02)
    assert held_out.loss < STATELESS_ENTROPY / 2
