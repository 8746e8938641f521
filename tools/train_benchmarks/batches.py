"""Random batches for the benchmark: equal on ranks that hold shards of the same samples, different otherwise."""

from __future__ import annotations

import math
from functools import partial

import torch

from megalin.data.batch import AnyBatch, Batch, EncoderBatch, batch_to, split_tokens
from megalin.model.config import AnyModelConfig, EncoderConfig
from megalin.model.encoder import MASKED_FRACTION
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig


def random_batches(run: RunConfig, mesh: Mesh, *, step: int = 0, document_length: int | None = None) -> list[AnyBatch]:
    """This rank's tokens of the micro-batches of a step; other tokens in each step."""
    generator = torch.Generator().manual_seed(step * mesh.samples.size + mesh.samples.rank)
    size = run.train.micro_batch_size
    count = run.train.global_batch_size // (size * mesh.samples.size)
    make = partial(random_batch, run.model, size, run.data.sequence_length, generator, document_length=document_length)
    return [batch_to(split_tokens(make(), mesh.cp), mesh.device) for _ in range(count)]


def random_batch(
    config: AnyModelConfig, samples: int, length: int, generator: torch.Generator, *, document_length: int | None = None
) -> AnyBatch:
    """Full sequences of random tokens, in documents of `document_length` each, or of the whole sequence."""
    if isinstance(config, EncoderConfig):
        return _random_encoder_batch(config, samples, length, generator)
    ids = torch.randint(0, config.vocab_size, (samples, length + 1), generator=generator)
    documents = torch.arange(length, dtype=torch.int32).div(document_length or length, rounding_mode="floor")
    numbers = torch.arange(samples)
    batch = Batch(ids[:, :-1], ids[:, 1:], documents.expand(samples, -1), numbers, numbers)
    return Batch(*(tensor.contiguous() for tensor in batch))


def _random_encoder_batch(config: EncoderConfig, samples: int, length: int, generator: torch.Generator) -> EncoderBatch:
    """Sequences of half to all of the length, two segments each; 15 % of the tokens or a class each to predict."""
    tokens = torch.randint(0, config.vocab_size, (samples, length), generator=generator)
    sizes = torch.randint((length + 1) // 2, length + 1, (samples, 1), generator=generator)
    positions = torch.arange(length)
    masked = torch.empty(samples, 0, dtype=torch.int64)
    if config.num_classes is None:
        scores = torch.rand(samples, length, generator=generator).masked_fill(positions >= sizes, 2.0)
        masked = scores.argsort(1)[:, : math.ceil(MASKED_FRACTION * length)].sort(1).values
    classes = torch.randint(0, config.num_classes or 2, (samples,), generator=generator)
    types = (positions >= sizes // 2).to(torch.int64)
    labels, numbers = tokens.gather(1, masked), torch.arange(samples)
    return EncoderBatch(tokens, types, positions < sizes, masked, labels, classes, numbers, numbers)
