"""Memory check of a run, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megalin.errors import ConfigError
from megalin.layers.config import mixer_types
from megalin.model.config import ModelConfig
from megalin.planner.estimate import Estimator
from megalin.planner.hardware import HARDWARE
from megalin.planner.memory import Memory
from megalin.planner.search import Limits, search, usable_bytes
from megalin.planner.workload import ParallelLayout, layout_of, workload_of
from megalin.train.config import RunConfig
from megalin.train.update_hooks import UpdateHook

MARGIN = 1.15
"""Ratio of estimate to GPU memory above which a run is refused. In measurements the estimate was at most 10.6 % too
high, and at most 7 % where it exceeded a quarter of the memory (docs/planner.md)."""

_SMALL = 64
"""Ratio of a host's memory to a model's states from which a run on a CPU starts without an estimate."""
_PASS_ON = "Pass --no-memory-check to start the run anyway"
DeviceType = Literal["cuda", "cpu"]


def check_memory(
    config: RunConfig,
    world_size: int,
    memory_bytes: int,
    hooks: Sequence[UpdateHook] = (),
    *,
    device: DeviceType = "cuda",
) -> int | None:
    """Refuses a run that cannot fit. The config has passed `check_launch`; no process group may be initialised.

    Weights, gradients and optimizer state, that of update hooks included, are counted exactly, and a run is refused if
    they alone do not fit. The total is an estimate, and a run is refused if it exceeds the memory by MARGIN. Models
    with external mixers, which may depend on data, are checked by the exact count only. Encoders and DeepSpeed, which
    shards differently, are not checked.

    Args:
        memory_bytes: memory of a rank's GPU or, on a CPU, its part of the host's.
        hooks: the run's update hooks.
        device: "cpu": the estimate is a rough one, and left out for a model that needs little of the memory.

    Returns:
        The estimate in bytes; None without one.

    Raises:
        ConfigError: the run does not fit; names the required memory and layouts on as many GPUs that fit.
    """
    model = config.model
    if not isinstance(model, ModelConfig) or config.train.engine != "fsdp2":
        return None
    workload, layout = workload_of(config, model, hooks), layout_of(config, world_size)
    # The hardware affects only the order of the suggested layouts.
    estimator = Estimator(workload, HARDWARE["h200"])
    model_states = estimator.model_state_bytes(layout)
    if model_states > memory_bytes:
        needed = f"weights, gradients and optimizer state alone need {model_states / 2**30:.1f} GiB"
    elif not _is_own(model) or (device == "cpu" and model_states < memory_bytes // _SMALL):
        return None
    else:
        allowed, sums = int(MARGIN * memory_bytes), _tree_bytes(config, estimator, layout)
        memory = _memory(estimator, layout, sums, allowed=allowed, refine=device != "cpu")
        if memory.total <= allowed:
            return memory.total
        parts = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:.1f}" for name, size in memory._asdict().items())
        needed = f"needs about {memory.total / 2**30:.1f} GiB ({parts})"
    if device == "cpu":
        raise _refusal_on_a_cpu(layout, needed, memory_bytes)
    remedy = _remedy(config, estimator, world_size, memory_bytes)
    raise ConfigError(
        f"train.micro_batch_size = {layout.micro_batch_size} with {layout.name()}: {needed} on a GPU of "
        f"{memory_bytes / 2**30:.1f} GiB; {remedy}. {_PASS_ON}"
    )


def _remedy(config: RunConfig, estimator: Estimator, world_size: int, memory_bytes: int) -> str:
    """Layouts on as many GPUs that fit. The search traces blocks, which external mixers may not support, and its
    layouts have the default reduction."""
    parallel, fitting = config.parallel, []
    if _is_own(estimator.workload.model) and config.train.reduction == "collective":
        limits = Limits(world_size, usable_bytes(memory_bytes), parallel.sequence_parallel, parallel.tp_overlap)
        fitting = search(estimator, limits, count=3).best
    if not fitting:
        return "use more GPUs, or a smaller micro-batch"
    options = "; ".join(" ".join(estimate.layout.overrides()) for estimate in fitting)
    if parallel.shard is not None:
        options = f"without parallel.shard: {options}"
    return f"these layouts fit on {world_size} GPUs: {options}"


def _refusal_on_a_cpu(layout: ParallelLayout, needed: str, memory_bytes: int) -> ConfigError:
    return ConfigError(
        f"train.micro_batch_size = {layout.micro_batch_size} with {layout.name()}: {needed}, and a rank on this CPU "
        f"has {memory_bytes / 2**30:.1f} GiB; use a GPU, a smaller model (megalin params lists some for CPUs), "
        f"or a smaller train.micro_batch_size or data.sequence_length. {_PASS_ON}"
    )


def _memory(estimator: Estimator, layout: ParallelLayout, sums: int, *, allowed: int, refine: bool) -> Memory:
    """Memory estimate with `sums` bytes more of gradients, refined (slow) only if eager blocks, which need more than
    compiled ones, exceed `allowed`."""
    memory = estimator.estimate(layout, refined=False).memory
    if memory.total + sums > allowed and refine:
        memory = estimator.estimate(layout, refined=True).memory
    return memory._replace(gradients=memory.gradients + sums)


def _tree_bytes(config: RunConfig, estimator: Estimator, layout: ParallelLayout) -> int:
    """Whole gradients in fp32 of `train.reduction = "tree"`: sums of a rank's micro-batches, and those of its ranks."""
    if config.train.reduction != "tree":
        return 0
    (stage,) = estimator.parameters(layout)
    return 4 * stage.whole * (layout.num_micro_batches.bit_length() + 2)


def _is_own(model: ModelConfig) -> bool:
    own = mixer_types()
    return all(sublayer.type in own for _, block in model.blocks() for sublayer in block.sublayers)
