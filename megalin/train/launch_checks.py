"""Checks of a run against its number of ranks, on the meta device and before the first collective."""

from __future__ import annotations

from collections.abc import Callable

from megalin.errors import ConfigError
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


def check_launch(config: RunConfig, world_size: int) -> None:
    """Checks the run against the number of ranks, without a process group, before the first collective.

    Raises:
        ConfigError: the mesh does not fit the ranks; or all that apply of: the batch does not fit the data axis or the
            pipeline; evaluations without a validation split; a size of the model is not divisible by tp, or the model
            cannot shard its sequences over cp or its layers over pp; the ranks cannot have CUDA graphs; the engine is
            not installed, or its own config contradicts this one.
    """
    check_world_size(config.parallel, world_size)
    checks: list[Callable[[], object]] = [
        lambda: _check_step(config, world_size),
        lambda: _check_evaluations(config),
        lambda: check_graph_ranks(config, world_size),
        lambda: check_model(config.model, config.parallel, config.data.sequence_length),
        lambda: check_float8_layers(config.model, config.parallel, float8_settings(config.train)),
    ]
    problems = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems", *problems]))


def _check_step(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError if the samples do not divide over the data axis or do not fill the pipeline, or if the engine
    is not installed or its own config contradicts this one."""
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
    if train.engine == "deepspeed":
        check_deepspeed_version()
        deepspeed_settings(config, world_size)


def _check_evaluations(config: RunConfig) -> None:
    """Raises ConfigError for keys of the evaluations of a run without a validation split. It is no check of the config,
    so that an older run with such keys can still be read."""
    if config.data.has("validation"):
        return
    values = {name: getattr(config.train, name) for name in EVALUATION_KEYS}
    if given := [f"train.{name} = {value}" for name, value in values.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(given)}: no effect without a validation split; set data.validation, "
            f"data.validation_fraction or data.split, or leave {'it' if len(given) == 1 else 'them'} out"
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
