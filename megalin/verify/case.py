"""What is verified: the user's model, shrunk unless asked otherwise, and batches that leave no symmetry to hide in."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from megalin.data.packing import Batch
from megalin.errors import ConfigError
from megalin.model.config import BlockConfig, ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.mesh import ParallelConfig
from megalin.parallel.tensor_parallel import TensorParallel

ROWS_PER_RANK = 2
NUM_MICRO_BATCHES = 2

DtypeName = Literal["float64", "float32", "bfloat16"]


class Case(NamedTuple):
    """One comparison."""

    model: ModelConfig
    parallel: ParallelConfig
    data_size: int
    """Ranks of the data axis, dp."""
    dtype: DtypeName
    """Compute dtype; weights are fp32 at rest, or fp64 for float64."""
    length: int
    """Tokens a row."""
    recompute: bool
    """Whether the parallel run recomputes activations."""
    seed: int = 0

    @property
    def compute_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return self.parallel.tp * self.data_size


def shrink(model: ModelConfig, tp: int) -> ModelConfig:
    """The structure of `model` at a size that answers in seconds.

    Every kind of block stays, each at most twice; at least two heads a rank, a GLU as wide as no other dimension, and
    a vocabulary that needs padding.
    """
    num_heads = max(4, 2 * tp)
    hidden_size = 8 * num_heads
    layers = [
        BlockConfig(
            repeat=min(block.repeat, 2),
            sublayers=[s.shrunk(hidden_size=hidden_size, num_heads=num_heads) for s in block.sublayers],
        )
        for block in model.layers
    ]
    # Rows are padded to a multiple of 128, which a tp of 3 or 5 does not divide: take enough of them.
    vocab_size = 128 * tp - 28 if 128 % tp else 300
    return model.model_copy(update={"vocab_size": vocab_size, "hidden_size": hidden_size, "layers": layers})


def shrunk_length(tp: int) -> int:
    """A length of several chunks of 16, no multiple of the chunk, that tp divides (sequence parallelism)."""
    return next(length for length in range(72, 72 + 2 * tp + 1) if length % tp == 0 and length % 16)


def make_batches(case: Case) -> list[Batch]:
    """The micro-batches of one step, all rows of the data axis: packed documents, unequal counts of valid labels.

    Documents end at, before and after a chunk's edge, one row is a single document, one is cut often; the second
    micro-batch has far fewer valid labels, so a local count or an average of averages shows.
    """
    generator = torch.Generator().manual_seed(case.seed + 1)
    rows, length, vocab = ROWS_PER_RANK * case.data_size, case.length, case.model.vocab_size
    batches = []
    for index in range(NUM_MICRO_BATCHES):
        ids = torch.randint(0, vocab, (rows, length + 1), generator=generator)
        starts = torch.zeros(rows, length, dtype=torch.int32)
        for row in range(rows):
            for position in [(), (16,), (15, 33), (17, 18, 47)][(row + index) % 4]:
                if position < length:
                    starts[row, position] = 1
        labels = ids[:, 1:].clone()
        labels[:, :-1][starts[:, 1:] == 1] = IGNORED_LABEL
        ignored = torch.rand(rows, length, generator=generator)
        row_share = torch.linspace(0.1, 0.4 + 0.5 * index, rows)[:, None]
        labels[ignored < row_share] = IGNORED_LABEL
        documents = starts.cumsum(1, dtype=torch.int32)
        batches.append(Batch(ids[:, :-1].contiguous(), labels, documents, torch.arange(rows)))
    return batches


def rank_batches(batches: list[Batch], data_rank: int, device: torch.device) -> list[Batch]:
    """The rows of one rank of the data axis."""
    rows = slice(data_rank * ROWS_PER_RANK, (data_rank + 1) * ROWS_PER_RANK)
    return [Batch(*(tensor[rows].to(device) for tensor in batch)) for batch in batches]


def make_case(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    data_size: int,
    dtype: DtypeName,
    full: bool,
    length: int | None,
    recompute: bool,
) -> Case:
    """The comparison that the user asked for.

    Raises:
        ConfigError: a length below 1, or one that sequence parallelism cannot split; a size that tp does not divide.
    """
    chosen = model if full else shrink(model, parallel.tp)
    length = (shrunk_length(parallel.tp) if not full else 8 * parallel.tp * 9) if length is None else length
    if length < 1:
        raise ConfigError(f"--length {length}: a row has at least 1 token")
    if parallel.sequence_parallel and length % parallel.tp:
        raise ConfigError(
            f"--length {length} is not divisible by tp = {parallel.tp}, as sequence parallelism needs; "
            f"use {length // parallel.tp * parallel.tp or parallel.tp}"
        )
    LanguageModel(chosen, TensorParallel(Axis("tp", parallel.tp)))
    return Case(chosen, parallel, data_size, dtype, length, recompute)
