"""What is verified: the user's model, shrunk unless asked otherwise, and batches that leave no symmetry to hide in."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import torch

from megalin.data.batch import AnyBatch, Batch, EncoderBatch, batch_to, split_tokens, take_samples
from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, BlockConfig, EncoderConfig, ModelConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.mesh import Mesh, ParallelConfig
from megalin.train.config import check_model

ROWS_PER_RANK = 2
PREDICTIONS = 11
"""Places for predictions in a row of an encoder, more than some rows have."""

DtypeName = Literal["float64", "float32", "bfloat16"]


class Case(NamedTuple):
    """One comparison."""

    model: AnyModelConfig
    parallel: ParallelConfig
    data_size: int
    """Groups of ranks that read different samples, dp."""
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
        return self.parallel.pp * self.parallel.tp * self.parallel.cp * self.data_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step: two, or enough for every stage to go forwards and backwards in turns."""
        return 2 * self.parallel.pp


def shrink(model: AnyModelConfig, tp: int, cp: int = 1, num_stages: int = 1) -> AnyModelConfig:
    """The structure of `model` at a size that answers in seconds.

    Every kind of block stays, each at most twice, or once more than there are stages; at least two heads a rank, a GLU
    as wide as no other dimension, and a vocabulary that needs padding.
    """
    num_heads = max(4, 2 * tp)
    hidden_size = 8 * num_heads
    layers = [
        BlockConfig(
            repeat=min(block.repeat, 2 if num_stages == 1 else num_stages + 1),
            sublayers=[s.shrink_for_verify(hidden_size=hidden_size, num_heads=num_heads) for s in block.sublayers],
        )
        for block in model.layers
    ]
    # Rows are padded to a multiple of 128, which a tp of 3 or 5 does not divide: take enough of them.
    vocab_size = 128 * tp - 28 if 128 % tp else 300
    update = {"vocab_size": vocab_size, "hidden_size": hidden_size, "layers": layers}
    if isinstance(model, EncoderConfig):
        update["max_positions"] = shrunk_length(tp * cp) + 5
    return model.model_copy(update=update)


def shrunk_length(parts: int) -> int:
    """A length of several chunks of 16, no multiple of the chunk, that as many parts divide: those of context and
    sequence parallelism."""
    return next(length for length in range(72, 72 + 2 * parts + 1) if length % parts == 0 and length % 16)


def make_batches(case: Case) -> list[AnyBatch]:
    """The micro-batches of one step, all rows of the data axis, with unequal counts of valid labels."""
    if isinstance(case.model, EncoderConfig):
        return [_encoder_batch(case, case.model, index) for index in range(case.num_micro_batches)]
    return [*_decoder_batches(case, case.model)]


def _decoder_batches(case: Case, model: ModelConfig) -> list[Batch]:
    """Packed documents.

    Documents end at, before and after the edge of a chunk, or of a rank's tokens; one row is a single document, one is
    cut often; each second micro-batch has far fewer valid labels, so a local count or an average of averages shows.
    """
    generator = torch.Generator().manual_seed(case.seed + 1)
    rows, length, vocab = ROWS_PER_RANK * case.data_size, case.length, model.vocab_size
    edge = 16 if case.parallel.cp == 1 else length // case.parallel.cp
    places = [(), (edge,), (edge - 1, 2 * edge + 1), (edge + 1, edge + 2, 3 * edge - 1)]
    batches = []
    for index in range(case.num_micro_batches):
        ids = torch.randint(0, vocab, (rows, length + 1), generator=generator)
        starts = torch.zeros(rows, length, dtype=torch.int32)
        for row in range(rows):
            for position in places[(row + ROWS_PER_RANK * index) % 4]:
                if position < length:
                    starts[row, position] = 1
        labels = ids[:, 1:].clone()
        labels[:, :-1][starts[:, 1:] == 1] = IGNORED_LABEL
        ignored = torch.rand(rows, length, generator=generator)
        row_share = torch.linspace(0.1, 0.4 + 0.5 * (index % 2), rows)[:, None]
        labels[ignored < row_share] = IGNORED_LABEL
        documents = starts.cumsum(1, dtype=torch.int32)
        batches.append(Batch(ids[:, :-1].contiguous(), labels, documents, torch.arange(rows)))
    return batches


def _encoder_batch(case: Case, model: EncoderConfig, index: int) -> EncoderBatch:
    """Two segments a row; rows without padding, with some, half of them, and nothing else.

    The second micro-batch has far fewer predictions; a row of padding has no label, of tokens or of the sequence.
    """
    generator = torch.Generator().manual_seed(case.seed + 1 + index)
    rows, length = ROWS_PER_RANK * case.data_size, case.length
    predictions = 0 if model.num_classes is not None else PREDICTIONS
    tokens = torch.randint(0, model.vocab_size, (rows, length), generator=generator)
    sizes = [(length, max(1, length - 5), length // 2, 0)[(row + 2 * index) % 4] for row in range(rows)]
    valid = torch.arange(length) < torch.tensor(sizes)[:, None]
    token_types = (torch.arange(length) >= torch.tensor(sizes)[:, None] // 3).to(torch.int64)
    positions = torch.zeros(rows, predictions, dtype=torch.int64)
    labels = torch.full((rows, predictions), IGNORED_LABEL)
    for row, size in enumerate(sizes):
        count = min(size, predictions if index == 0 else max(1, predictions // 4))
        positions[row, :count] = torch.randperm(size, generator=generator)[:count].sort().values
        labels[row, :count] = torch.randint(0, model.vocab_size, (count,), generator=generator)
    classes = torch.randint(0, model.num_classes or 2, (rows,), generator=generator)
    classes[torch.tensor(sizes) == 0] = IGNORED_LABEL
    return EncoderBatch(tokens, token_types, valid, positions, labels, classes, torch.arange(rows))


def rank_batches(batches: list[AnyBatch], mesh: Mesh) -> list[AnyBatch]:
    """This rank's tokens of its rows."""
    rows = slice(mesh.samples.rank * ROWS_PER_RANK, (mesh.samples.rank + 1) * ROWS_PER_RANK)
    return [batch_to(split_tokens(take_samples(batch, rows), mesh.cp), mesh.device) for batch in batches]


def make_case(
    model: AnyModelConfig,
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
        ConfigError: a length below 1 or the model's widest window, beyond an encoder's positions, or one that the mesh
            cannot split; a size that tp does not divide; a model that cannot split its sequences.
    """
    num_stages = parallel.pp * parallel.pp_stages_per_rank
    chosen = model if full else shrink(model, parallel.tp, parallel.cp, num_stages)
    parts = parallel.tp * parallel.cp
    length = (shrunk_length(parts) if not full else 8 * parts * 9) if length is None else length
    if length < 1:
        raise ConfigError(f"--length {length}: a row has at least 1 token")
    if isinstance(chosen, EncoderConfig) and length > chosen.max_positions:
        raise ConfigError(
            f"--length {length}: the model has model.max_positions = {chosen.max_positions}; use at most as many"
        )
    if problem := parallel.length_problem(length):
        raise ConfigError(f"--length {length} {problem}")
    window = max(sub.widest_window or 1 for _, block in chosen.blocks() for sub in block.sublayers)
    if window > length:
        fits = next(size for size in itertools.count(window) if not parallel.length_problem(size))
        raise ConfigError(
            f"--length {length}: the {'' if full else 'shrunk '}model has a window of {window} tokens, which a "
            f"row must hold; use --length {fits} or more"
        )
    if problem := parallel.split_backward_problem(recompute=recompute, compiled=False):
        raise ConfigError(f"parallel.{problem}")
    check_model(chosen, parallel, length)
    return Case(chosen, parallel, data_size, dtype, length, recompute)
