"""Random batches for the benchmark: equal on ranks that hold shards of the same samples, different otherwise."""

from __future__ import annotations

import argparse
import math

import torch

from megalin.data.batch import AnyBatch, Batch, EncoderBatch, batch_to, split_tokens
from megalin.model.config import AnyModelConfig, EncoderConfig
from megalin.model.encoder import MASKED_FRACTION
from megalin.parallel.mesh import Mesh


def random_batches(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> list[AnyBatch]:
    """This rank's tokens of the micro-batches of a step."""
    generator = torch.Generator().manual_seed(mesh.samples.rank)
    batches = [random_batch(arguments, config, generator) for _ in range(arguments.micro_batches)]
    return [batch_to(split_tokens(batch, mesh.cp), mesh.device) for batch in batches]


def random_batch(arguments: argparse.Namespace, config: AnyModelConfig, generator: torch.Generator) -> AnyBatch:
    """Full sequences of random tokens, in documents of `--document-length` each."""
    if isinstance(config, EncoderConfig):
        return _random_encoder_batch(arguments, config, generator)
    ids = torch.randint(0, config.vocab_size, (arguments.batch, arguments.length + 1), generator=generator)
    document = arguments.document_length or arguments.length
    documents = torch.arange(arguments.length, dtype=torch.int32).div(document, rounding_mode="floor")
    batch = Batch(ids[:, :-1], ids[:, 1:], documents.expand(arguments.batch, -1), torch.arange(arguments.batch))
    return Batch(*(tensor.contiguous() for tensor in batch))


def _random_encoder_batch(
    arguments: argparse.Namespace, config: EncoderConfig, generator: torch.Generator
) -> EncoderBatch:
    """Sequences of half to all of the length, two segments each; 15 % of the tokens or a class each to predict."""
    samples, length = arguments.batch, arguments.length
    tokens = torch.randint(0, config.vocab_size, (samples, length), generator=generator)
    sizes = torch.randint((length + 1) // 2, length + 1, (samples, 1), generator=generator)
    positions = torch.arange(length)
    masked = torch.empty(samples, 0, dtype=torch.int64)
    if config.num_classes is None:
        scores = torch.rand(samples, length, generator=generator).masked_fill(positions >= sizes, 2.0)
        masked = scores.argsort(1)[:, : math.ceil(MASKED_FRACTION * length)].sort(1).values
    classes = torch.randint(0, config.num_classes or 2, (samples,), generator=generator)
    types = (positions >= sizes // 2).to(torch.int64)
    return EncoderBatch(
        tokens, types, positions < sizes, masked, tokens.gather(1, masked), classes, torch.arange(samples)
    )
