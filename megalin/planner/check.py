"""Whether a run fits its GPUs, asked before anything is built."""

from __future__ import annotations

from megalin.errors import ConfigError
from megalin.layers.mixers.base import mixer_types
from megalin.model.config import ModelConfig
from megalin.planner.estimate import Estimator
from megalin.planner.hardware import CHIPS
from megalin.planner.memory import Memory
from megalin.planner.search import Limits, for_tensors, search
from megalin.planner.workload import ParallelLayout, layout_of, workload_of
from megalin.train.config import RunConfig

MARGIN = 1.15
"""How far the estimate must exceed a GPU's memory for a run to be refused; of what was measured it was at most 10.6 %
too much, and beyond a quarter of the memory 7 % (docs/planner.md)."""


def check_memory(config: RunConfig, world_size: int, memory_bytes: int | None) -> None:
    """Refuses a run that cannot fit. The config has passed `check_launch`; no process group may be initialised.

    Weights, gradients and optimizer state are counted exactly and refused when they alone do not fit; the whole is an
    estimate, refused where it exceeds the memory by MARGIN. Of models with mixers from elsewhere, which may read data,
    the exact part alone is asked. Encoders, and runs by DeepSpeed, which shards in its own way, are not checked.

    Args:
        memory_bytes: of each GPU; None where it is not known, as on a CPU: nothing is checked.

    Raises:
        ConfigError: what is missing, and which layouts on as many GPUs would fit.
    """
    model = config.model
    if memory_bytes is None or not isinstance(model, ModelConfig) or config.train.engine != "fsdp2":
        return
    workload, layout = workload_of(config, model), layout_of(config, world_size)
    # The chip orders what is suggested and has no part in what is refused.
    estimator = Estimator(workload, CHIPS["h200"])
    resting = estimator.resting_bytes(layout)
    if resting > memory_bytes:
        what = f"weights, gradients and optimizer state alone are {resting / 2**30:.1f} GiB"
    elif not _is_own(model):
        return
    else:
        memory = _memory(estimator, layout, allowed=int(MARGIN * memory_bytes))
        if memory.total <= MARGIN * memory_bytes:
            return
        parts = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:.1f}" for name, size in memory._asdict().items())
        what = f"about {memory.total / 2**30:.1f} GiB are needed ({parts})"
    parallel = config.parallel
    limits = Limits(world_size, for_tensors(memory_bytes), parallel.sequence_parallel, parallel.tp_overlap)
    # A search runs blocks too: not those from elsewhere.
    fitting = search(estimator, limits, count=3).best if _is_own(model) else []
    options = "; ".join(" ".join(estimate.layout.overrides()) for estimate in fitting)
    if config.parallel.shard is not None:
        options = f"with parallel.shard left out: {options}"
    remedy = f"on {world_size} GPUs these fit: {options}" if fitting else "use more GPUs, or a smaller micro-batch"
    raise ConfigError(
        f"train.micro_batch_size = {layout.micro_batch_size} with {layout.name()}: {what} on a GPU of "
        f"{memory_bytes / 2**30:.1f} GiB; {remedy}. --no-memory-check starts it all the same"
    )


def _memory(estimator: Estimator, layout: ParallelLayout, *, allowed: int) -> Memory:
    """The estimate; the slower trace of compiled blocks only where eager ones, which hold more, exceed `allowed`."""
    memory = estimator.estimate(layout, closely=False).memory
    return memory if memory.total <= allowed else estimator.estimate(layout, closely=True).memory


def _is_own(model: ModelConfig) -> bool:
    own = mixer_types()
    return all(sublayer.type in own for _, block in model.blocks() for sublayer in block.sublayers)
