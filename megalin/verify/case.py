"""Inputs of a verification: the user's model, shrunk by default, and batches without symmetries that hide faults."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import torch

from megalin.data.batch import AnyBatch, Batch, EncoderBatch, batch_to, split_tokens, take_samples
from megalin.errors import ConfigError
from megalin.layers.config import MixerConfig
from megalin.layers.mixer_configs.ffn import FFNConfig
from megalin.layers.mixer_configs.glu import GLUConfig
from megalin.layers.mixer_configs.softmax import SoftmaxConfig
from megalin.model.config import AnyModelConfig, BlockConfig, EncoderConfig, ModelConfig, max_positions_key
from megalin.ops.choices import ALIGNMENT
from megalin.parallel.config import ParallelConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.float8_layers import MIN_WIDTH, Float8Settings
from megalin.parallel.mesh import Mesh
from megalin.train.float8 import check_float8_layers
from megalin.train.launch_checks import check_model

SAMPLES_PER_RANK = 2
FLOAT8_MIN_WIDTH = 16
"""Width of the layers of shrunk models from which they multiply in FP8."""
HEAD_DIM = 8
"""Width of a head of shrunk models."""
PREDICTIONS = 11
"""Positions for predictions in an encoder's sample, more than some samples have valid tokens."""

_FIRST_DRAW = 2**33 - 3

DtypeName = Literal["float64", "float32", "bfloat16", "float16", "float8"]


class Case(NamedTuple):
    """Configuration of one comparison."""

    model: AnyModelConfig
    parallel: ParallelConfig
    data_size: int
    """Groups of ranks that read different samples, dp."""
    dtype: DtypeName
    """Compute dtype; weights are stored in fp32, or in fp64 for float64. float8: fp64 around e4m3 operands of the
    blocks' wide linear layers."""
    length: int
    """Tokens per sequence."""
    recompute: bool
    """True if the parallel run recomputes activations."""
    seed: int = 0
    float8: Float8Settings | None = None
    """The FP8 matmuls, for dtype float8."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The torch dtype."""
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return dtypes.get(self.dtype, torch.float64)

    @property
    def is_half(self) -> bool:
        """True for bf16 and fp16, whose rounding is measured (docs/adr/0004-bf16-bounds.md)."""
        return self.compute_dtype.itemsize == 2

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return self.parallel.pp * self.parallel.tp * self.parallel.cp * self.data_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step: two, or enough for every stage to alternate forward and backward."""
        return 2 * self.parallel.pp


def shrink(model: AnyModelConfig, tp: int, cp: int = 1, num_stages: int = 1, *, float8: bool = False) -> AnyModelConfig:
    """The structure of `model` at a size that is verified in seconds; for `float8`, 16 divides the sizes of a rank.

    Every kind of block stays, each at most twice, or once more than there are stages; at least two heads per rank, a
    GLU width that differs from every other dimension, and a vocabulary that needs padding.
    """
    num_heads = max(4, 2 * tp)
    # The vocabulary is padded to a multiple of 128, which tp 3 or 5 does not divide: use a larger vocabulary then.
    vocab_size = 128 * tp - 28 if 128 % tp else 300
    repeat = 2 if num_stages == 1 else num_stages + 1
    shrunk = shrink_to(
        model, num_heads=num_heads, repeat=repeat, vocab_size=vocab_size, max_positions=shrunk_length(tp * cp) + 5
    )
    if not float8:
        return shrunk
    layers = [
        block.model_copy(update={"sublayers": [_aligned(s, shrunk.hidden_size, tp) for s in block.sublayers]})
        for block in shrunk.layers
    ]
    return shrunk.model_copy(update={"layers": layers})


def _aligned(sublayer: MixerConfig, hidden_size: int, tp: int) -> MixerConfig:
    """A shrunk sub-layer with widths of a rank that 16 divides, which still differ from the model's width."""
    if isinstance(sublayer, GLUConfig | FFNConfig):
        return sublayer.model_copy(update={"intermediate_size": hidden_size + ALIGNMENT * tp})
    if isinstance(sublayer, SoftmaxConfig) and sublayer.head_dim is not None:
        return sublayer.model_copy(update={"head_dim": HEAD_DIM})
    return sublayer


def shrink_to(
    model: AnyModelConfig, *, num_heads: int, repeat: int, vocab_size: int, max_positions: int
) -> AnyModelConfig:
    """The structure of `model` with `num_heads` heads of width 8 and every kind of block at most `repeat` times.

    Args:
        max_positions: of an encoder.
    """
    hidden_size = HEAD_DIM * num_heads
    layers = [
        BlockConfig(
            repeat=min(block.repeat, repeat),
            sublayers=[s.shrink_for_verify(hidden_size=hidden_size, num_heads=num_heads) for s in block.sublayers],
        )
        for block in model.layers
    ]
    update = {"vocab_size": vocab_size, "hidden_size": hidden_size, "layers": layers}
    if isinstance(model, EncoderConfig):
        update["max_positions"] = max_positions
    return model.model_copy(update=update)


def check_full_size(model: AnyModelConfig, parallel: ParallelConfig, dtype: DtypeName) -> None:
    """Raises ConfigError where `megalin train` refuses the mesh for the model at its full size. The shrunk model has
    sizes that fit any mesh, so its comparison cannot show that."""
    widest = max(sub.widest_window or 1 for _, block in model.blocks() for sub in block.sublayers)
    check_model(model, parallel, widest)
    if dtype == "float8":
        check_float8_layers(model, parallel, Float8Settings())


def shrunk_length(num_shards: int) -> int:
    """A length of several chunks of 16, not a multiple of 16, divisible by `num_shards`, the shards of context and
    sequence parallelism."""
    return next(length for length in range(72, 72 + 2 * num_shards + 1) if length % num_shards == 0 and length % 16)


def make_batches(case: Case) -> list[AnyBatch]:
    """The micro-batches of one step, with all samples of the data axis and unequal counts of valid labels."""
    if isinstance(case.model, EncoderConfig):
        return [_encoder_batch(case, case.model, index) for index in range(case.num_micro_batches)]
    return [*_decoder_batches(case, case.model)]


def _decoder_batches(case: Case, model: ModelConfig) -> list[Batch]:
    """Micro-batches of packed documents.

    Documents end at, before and after the boundary of a chunk, or of a rank's tokens; one sample is a single document,
    one has many. Every second micro-batch has far fewer valid labels, which exposes local counts and averages of
    averages.
    """
    generator = torch.Generator().manual_seed(case.seed + 1)
    samples, length, vocab = SAMPLES_PER_RANK * case.data_size, case.length, model.vocab_size
    edge = 16 if case.parallel.cp == 1 else length // case.parallel.cp
    positions = [(), (edge,), (edge - 1, 2 * edge + 1), (edge + 1, edge + 2, 3 * edge - 1)]
    batches = []
    for index in range(case.num_micro_batches):
        ids = torch.randint(0, vocab, (samples, length + 1), generator=generator)
        starts = torch.zeros(samples, length, dtype=torch.int32)
        for sample in range(samples):
            for position in positions[(sample + SAMPLES_PER_RANK * index) % 4]:
                if position < length:
                    starts[sample, position] = 1
        labels = ids[:, 1:].clone()
        labels[:, :-1][starts[:, 1:] == 1] = IGNORED_LABEL
        ignored = torch.rand(samples, length, generator=generator)
        ignored_fraction = torch.linspace(0.1, 0.4 + 0.5 * (index % 2), samples)[:, None]
        labels[ignored < ignored_fraction] = IGNORED_LABEL
        documents = starts.cumsum(1, dtype=torch.int32)
        draw = _draws(samples, index)
        batches.append(Batch(ids[:, :-1].contiguous(), labels, documents, torch.arange(samples), draw))
    return batches


def _encoder_batch(case: Case, model: EncoderConfig, index: int) -> EncoderBatch:
    """A micro-batch with two segments per sample; samples have no padding, some, half, or are padding only.

    The second micro-batch has far fewer predictions; a padding-only sample has no token or sequence label.
    """
    generator = torch.Generator().manual_seed(case.seed + 1 + index)
    samples, length = SAMPLES_PER_RANK * case.data_size, case.length
    predictions = 0 if model.num_classes is not None else PREDICTIONS
    tokens = torch.randint(0, model.vocab_size, (samples, length), generator=generator)
    sizes = [(length, max(1, length - 5), length // 2, 0)[(sample + 2 * index) % 4] for sample in range(samples)]
    valid = torch.arange(length) < torch.tensor(sizes)[:, None]
    token_types = (torch.arange(length) >= torch.tensor(sizes)[:, None] // 3).to(torch.int64)
    positions = torch.zeros(samples, predictions, dtype=torch.int64)
    labels = torch.full((samples, predictions), IGNORED_LABEL)
    for sample, size in enumerate(sizes):
        count = min(size, predictions if index == 0 else max(1, predictions // 4))
        positions[sample, :count] = torch.randperm(size, generator=generator)[:count].sort().values
        labels[sample, :count] = torch.randint(0, model.vocab_size, (count,), generator=generator)
    classes = torch.randint(0, model.num_classes or 2, (samples,), generator=generator)
    classes[torch.tensor(sizes) == 0] = IGNORED_LABEL
    draw = _draws(samples, index)
    return EncoderBatch(tokens, token_types, valid, positions, labels, classes, torch.arange(samples), draw)


def _draws(samples: int, index: int) -> torch.Tensor:
    """Numbers of the samples of micro-batch `index` in a long run, [samples], so that their high 32 bits count."""
    return _FIRST_DRAW + torch.arange(index * samples, (index + 1) * samples)


def rank_batches(batches: list[AnyBatch], mesh: Mesh) -> list[AnyBatch]:
    """This rank's shard of the micro-batches: its tokens of its samples."""
    samples = slice(mesh.samples.rank * SAMPLES_PER_RANK, (mesh.samples.rank + 1) * SAMPLES_PER_RANK)
    return [batch_to(split_tokens(take_samples(batch, samples), mesh.cp), mesh.device) for batch in batches]


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
    """Builds the comparison for the command's options.

    Raises:
        ConfigError: a length below 1, below the model's widest window, above its learned positions, or not divisible
            by the mesh; a size that tp does not divide; a model that cannot split its sequences.
    """
    num_stages = parallel.pp * parallel.pp_stages_per_rank
    float8 = dtype == "float8"
    chosen = model if full else shrink(model, parallel.tp, parallel.cp, num_stages, float8=float8)
    num_shards = parallel.tp * parallel.cp
    length = (shrunk_length(num_shards) if not full else 8 * num_shards * 9) if length is None else length
    if length < 1:
        raise ConfigError(f"--length {length}: a sequence has at least 1 token")
    if chosen.max_positions is not None and length > chosen.max_positions:
        raise ConfigError(
            f"--length {length}: the model has {max_positions_key(chosen)} = {chosen.max_positions}; use at most that "
            "length"
        )
    if problem := parallel.length_problem(length):
        raise ConfigError(f"--length {length} {problem}")
    window = max(sub.widest_window or 1 for _, block in chosen.blocks() for sub in block.sublayers)
    if window > length:
        fits = next(size for size in itertools.count(window) if not parallel.length_problem(size))
        raise ConfigError(
            f"--length {length}: the {'' if full else 'shrunk '}model has a window of {window} tokens, more than "
            f"the length; use --length {fits} or more"
        )
    if problem := parallel.split_backward_problem(recompute=recompute, compiled=False):
        raise ConfigError(f"parallel.{problem}")
    check_model(chosen, parallel, length)
    settings = Float8Settings(MIN_WIDTH if full else FLOAT8_MIN_WIDTH) if float8 else None
    check_float8_layers(chosen, parallel, settings)
    return Case(chosen, parallel, data_size, dtype, length, recompute, float8=settings)
