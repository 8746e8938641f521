"""Checks of a run against its number of ranks, on the meta device and before the first collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalin.data.datasets.megatron import check_megatron_seed
from megalin.data.datasets.token import check_tokenizer
from megalin.data.masking import resolve_tokens
from megalin.data.tokenizers.tokenizer import BYTES
from megalin.errors import ConfigError, MegalinError
from megalin.model.build import check_divisions, make_model
from megalin.model.config import AnyModelConfig
from megalin.model.pipeline_stages import plan_stages
from megalin.parallel.collectives import Axis
from megalin.parallel.config import ParallelConfig
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.mesh import check_world_size
from megalin.parallel.tensor_parallel import TensorParallel
from megalin.train.config import RunConfig, TrainConfig
from megalin.train.deepspeed_config import check_deepspeed_version
from megalin.train.deepspeed_settings import deepspeed_settings
from megalin.train.float8 import check_float8_layers, float8_settings
from megalin.train.graph_choice import check_graph_ranks
from megalin.train.reduction import check_tree_ranks

EVALUATION_KEYS = ("evaluate_every_steps", "evaluate_batches")
"""Keys of [train] that only evaluations of the validation split read."""


def check_launch(config: RunConfig, world_size: int | None) -> None:
    """Checks what a start would refuse before its first step without a look at data: the config and, if it is given,
    the number of ranks. Needs no process group.

    Raises:
        ConfigError: the mesh does not fit the ranks; or all that apply of: the batch does not fit the data axis or the
            pipeline; the ranks cannot have CUDA graphs; evaluations without a validation split; a byte tokenizer,
            special tokens or a seed that the model or the order cannot have; a size of the model is not divisible by
            tp, or the model cannot shard its sequences over cp or its layers over pp; the engine or FP8 matmuls do not
            support the model or the mesh; the engine is not installed, or its own config contradicts this one.
    """
    raise_together(launch_checks(config, world_size))


def launch_checks(config: RunConfig, world_size: int | None) -> list[Callable[[], object]]:
    """The checks of `check_launch`, for those that have more. They are no part of `RunConfig`, so that older runs that
    they refuse can still be read. Raises ConfigError if the mesh does not fit the ranks."""
    checks: list[Callable[[], object]] = []
    if world_size is not None:
        check_world_size(config.parallel, world_size)
        checks = [lambda: _check_step(config, world_size), lambda: check_graph_ranks(config, world_size)]
    return [
        *checks,
        lambda: _check_evaluations(config),
        lambda: _check_data(config),
        lambda: check_model(config.model, config.parallel, config.data.sequence_length),
        lambda: check_float8_layers(config.model, config.parallel, float8_settings(config.train)),
        lambda: _check_deepspeed(config, world_size),
    ]


def raise_together(checks: Sequence[Callable[[], object]]) -> None:
    """Runs all checks. Raises ConfigError with the problems of those that fail, each once."""
    problems: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except MegalinError as error:
            problems[str(error)] = None
    if problems:
        lines = [f"{len(problems)} problems", *problems] if len(problems) > 1 else [*problems]
        raise ConfigError("\n  ".join(lines))


def _check_step(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError if the samples do not divide over the data axis or do not fill the pipeline."""
    train, parallel = config.train, config.parallel
    check_tree_ranks(train, world_size)
    data_size = world_size // (parallel.tp * parallel.cp * parallel.pp)
    together = train.micro_batch_size * data_size
    if train.global_batch_size % together:
        below = train.global_batch_size // together * together
        fits = " or ".join(str(size) for size in (below, below + together) if size)
        raise ConfigError(
            f"train.global_batch_size = {train.global_batch_size} is not divisible by train.micro_batch_size = "
            f"{train.micro_batch_size} times the {_ranks_of_samples(parallel, data_size)}; use {fits}"
        )
    if problem := parallel.micro_batches_problem(train.global_batch_size // together):
        raise ConfigError(
            f"parallel.{problem}: train.global_batch_size = {train.global_batch_size} is that many times "
            f"train.micro_batch_size = {train.micro_batch_size} times dp = {data_size}; use "
            f"{_batches_that_fill(train, parallel, data_size)}"
        )


def _check_evaluations(config: RunConfig) -> None:
    """Raises ConfigError for keys of the evaluations of a run without a validation split."""
    if config.data.has("validation"):
        return
    values = {name: getattr(config.train, name) for name in EVALUATION_KEYS}
    if given := [f"train.{name} = {value}" for name, value in values.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(given)}: no effect without a validation split; set data.validation, "
            f"data.validation_fraction or data.split, or leave {'it' if len(given) == 1 else 'them'} out"
        )


def _check_data(config: RunConfig) -> None:
    """Raises MegalinError, as the start does, for what the data cannot have whatever their files contain."""
    data, vocab_size = config.data, config.model.vocab_size
    if data.order == "megatron":
        check_megatron_seed(config.train.seed)
    if data.tokenizer not in (None, BYTES):
        return
    tokenizer = check_tokenizer(data, vocab_size)
    if data.masking is not None:
        resolve_tokens(data.masking, tokenizer, vocab_size)


def _check_deepspeed(config: RunConfig, world_size: int | None) -> None:
    """Raises ConfigError where DeepSpeed is not installed (if there are ranks) or its own config contradicts this one,
    or for mixers that derive values from whole weights where only a shard of them, or nothing, is present."""
    if config.train.engine != "deepspeed":
        return
    if world_size is not None:
        check_deepspeed_version()
    stage, tp = deepspeed_settings(config, world_size)["zero_optimization"]["stage"], config.parallel.tp
    if (tp > 1 or stage == 3) and any(mixer.norm_tracked_weights() for mixer in make_model(config.model).mixers()):
        raise ConfigError(
            f'train.engine = "deepspeed" with parallel.tp = {tp} and ZeRO stage {stage}: after each step a '
            "mixer of this model reads whole weights, which are in one place only with tp = 1 and stages 0 to 2; use "
            'these, or engine = "fsdp2"'
        )


def _batches_that_fill(train: TrainConfig, parallel: ParallelConfig, data_size: int) -> str:
    """The nearest values of each batch key that fill the pipeline, as text."""
    together, samples = train.micro_batch_size * data_size, train.global_batch_size // data_size
    below = samples // train.micro_batch_size // parallel.pp * parallel.pp * together
    above = below + parallel.pp * together
    if parallel.pp_schedule == "1f1b":  # too few micro-batches for the stages; any larger number works
        sizes = f"{above} or " + (f"a larger multiple of {together}" if together > 1 else "more")
    else:
        sizes = f"{below} or {above}" if below else f"{above}"
    smaller = [
        size
        for size in range(1, train.micro_batch_size)
        if samples % size == 0 and not parallel.micro_batches_problem(samples // size)
    ]
    return f"train.global_batch_size = {sizes}" + (f", or train.micro_batch_size = {smaller[-1]}" if smaller else "")


def check_model(model: AnyModelConfig, parallel: ParallelConfig, length: int) -> None:
    """Raises ConfigError for a model that cannot be sharded as `parallel` says, or that has windows wider than `length`
    tokens; needs no process group."""
    for path, block in model.blocks():
        for index, sublayer in enumerate(block.sublayers):
            if sublayer.widest_window is not None and sublayer.widest_window > length:
                raise ConfigError(
                    f"{path}.sublayers.{index}.window = {sublayer.widest_window} is wider than the {length} tokens of "
                    f"a sequence; use at most {length}, or longer sequences"
                )
    check_divisions(model, parallel.tp)
    whole = make_model(model, TensorParallel(Axis("tp", parallel.tp)), cp=ContextParallel(Axis("cp", parallel.cp)))
    if parallel.pp > 1:
        plan_stages(model, parallel.pp * parallel.pp_stages_per_rank, num_ranks=parallel.pp, length=length)
        shared = list(whole.shared)
        if shared and parallel.pp_schedule == "zero_bubble":
            raise ConfigError(
                f'parallel.pp_schedule = "zero_bubble" computes the gradients of weights separately, but blocks of '
                f'type "{shared[0]}" share parameters, whose gradients torch cannot separate; use pp_schedule = '
                '"interleaved" or "1f1b"'
            )


def _ranks_of_samples(parallel: ParallelConfig, size: int) -> str:
    if parallel.cp == 1:
        return f"data axis of {size} ranks"
    return f"{size} groups of parallel.cp = {parallel.cp} ranks that read different samples"
