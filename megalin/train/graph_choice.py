"""Choice of train.cuda_graphs = "auto": obstacles in a run's config and environment, and the memory of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megalin.errors import ConfigError

if TYPE_CHECKING:
    from megalin.train.config import RunConfig

MOST_MICRO_BATCHES = 32
"""Micro-batches a step up to which a graph is chosen: each one adds all of its kernels to the graph, which then takes
longer to capture and more memory of its own."""
CAPTURE_RATIO = 1.1
"""Free memory of the device, in multiples of a step's, from which a graph is chosen: a capture allocates that of a step
once, and the update, which runs next to it, allocates little."""
EVALUATION_RATIO = 1.5
"""Free memory, in multiples of a step's, from which the graph stays during evaluations, which cannot use what it keeps;
with less it is dropped before an evaluation, and captured again after it."""
MOST_GROWTH = 0.1
"""Fraction by which a graph may raise the memory that eager steps reserve."""
MOST_DROPS = 8
"""Drops of a graph, for documents of batches outside of its bounds, after which replays are counted: as many as the
bounds grow in most runs."""
LEAST_REPLAYS = 16
"""Replays a drop on average with which a graph is captured again: that takes about as long as two eager steps."""
GRANULARITY_BYTES = 2**28
"""Growth that is always allowed: it lies within the sizes in which the allocator reserves memory."""
_FORCED = "; train.cuda_graphs = true overrides this"


class Obstacle(NamedTuple):
    """A setting with which a step cannot be a CUDA graph."""

    cause: str
    """The setting with its value, and the reason."""
    remedy: str
    """A setting without the obstacle."""


class StepMemory(NamedTuple):
    """Memory of a GPU, bytes, between two eager steps."""

    reserved: int
    """Reserved by the allocator, cached memory of the steps included."""
    kept: int
    """Reserved after cached memory was returned to the device: weights, optimizer state."""
    free: int
    """Free on the device after that."""


def config_obstacles(config: RunConfig) -> Iterator[Obstacle]:
    """Obstacles to a CUDA graph on any number of ranks."""
    if config.train.engine == "deepspeed":
        yield Obstacle('train.engine = "deepspeed", which launches its own kernels', 'engine = "fsdp2"')
    if config.parallel.pp > 1:
        yield Obstacle(f"parallel.pp = {config.parallel.pp}, whose ranks wait for each other on the host", "pp = 1")
    if config.train.reduction == "tree":
        yield Obstacle(
            'train.reduction = "tree", which takes the gradients of each micro-batch', 'reduction = "collective"'
        )


def mixers_that_read_documents(config: RunConfig) -> list[str]:
    """Types of the mixers for which the host reads document boundaries."""
    sublayers = [sublayer for _, block in config.model.blocks() for sublayer in block.sublayers]
    return sorted({sublayer.type for sublayer in sublayers if sublayer.host_reads_documents})


def check_graph_ranks(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError with cuda_graphs = true on several ranks if the host reads document boundaries: the ranks
    would replay and run eagerly in different steps."""
    if config.train.cuda_graphs is True and world_size > 1 and (reading := mixers_that_read_documents(config)):
        raise ConfigError(
            f"train.cuda_graphs = true with the mixer {', '.join(reading)}, for which the host reads the document "
            f'boundaries of each batch, on {world_size} ranks; use cuda_graphs = false, or backend = "mask" in its '
            "config"
        )


def allocator_obstacle(environment: Mapping[str, str]) -> Obstacle | None:
    """The obstacle of an allocator whose memory NCCL would register by addresses that change."""
    settings = environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + environment.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" not in settings or environment.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    return Obstacle(
        "the allocator's expandable_segments:True: NCCL would register buffers of the graph by addresses that are not "
        "fixed",
        "NCCL_GRAPH_REGISTER=0 in the environment",
    )


def automatic_obstacle(
    config: RunConfig, *, device: str, world_size: int, environment: Mapping[str, str]
) -> str | None:
    """Reason for which "auto" chooses no CUDA graph before the run starts; None: it depends on memory alone.

    Args:
        device: type of the device.
        environment: environment variables.
    """
    if device != "cuda":
        return f"a {device} device, which has none"
    for obstacle in config_obstacles(config):
        return obstacle.cause
    types = {sublayer.type for _, block in config.model.blocks() for sublayer in block.sublayers}
    if others := sorted(name for name in types if "." in name):
        return f"the mixer {', '.join(others)} of another package, whose Python code a graph would not repeat{_FORCED}"
    if world_size > 1:
        return f"{world_size} ranks, whose graphs have not been seen on several GPUs on every mesh yet{_FORCED}"
    micro_batches = config.train.global_batch_size // config.train.micro_batch_size
    if micro_batches > MOST_MICRO_BATCHES:
        return f"{micro_batches} micro-batches a step, more than {MOST_MICRO_BATCHES} in one graph{_FORCED}"
    blocked = allocator_obstacle(environment)
    return None if blocked is None else f"{blocked.cause} (remedy: {blocked.remedy})"


def memory_obstacle(memory: StepMemory) -> str | None:
    """Reason for which a graph would leave too little memory; None: it can be captured."""
    step = memory.reserved - memory.kept
    if memory.free >= CAPTURE_RATIO * step:
        return None
    return (
        f"a graph keeps the {_gib(step)} of a step, and {_gib(memory.free)} are free, less than {CAPTURE_RATIO:g} "
        f"times that{_FORCED}"
    )


def leaves_no_evaluation(memory: StepMemory) -> bool:
    """Whether a graph must be dropped before evaluations, to make room for them."""
    return memory.free < EVALUATION_RATIO * (memory.reserved - memory.kept)


def waits_obstacle(places: Sequence[str]) -> str | None:
    """Reason of a step in which the host waits for the device, at files and lines; None without such places."""
    return f"the host waits for the device in a step, at {places[0]}" if places else None


def growth_obstacle(eager: int, captured: int) -> str | None:
    """Reason for which a captured graph takes too much memory: bytes reserved by eager steps, and with the graph."""
    if captured - eager <= max(MOST_GROWTH * eager, GRANULARITY_BYTES):
        return None
    return (
        f"with a graph the run reserves {_gib(captured)}, more than {MOST_GROWTH:.0%} above the {_gib(eager)} of eager "
        f"steps{_FORCED}"
    )


def recaptures_obstacle(*, drops: int, replays: int) -> str | None:
    """Reason to capture no graph again: it was dropped for the documents of batches, and replayed, so many times."""
    if drops <= MOST_DROPS or replays >= LEAST_REPLAYS * drops:
        return None
    return (
        f"more or longer documents, or sequences of one document in other micro-batches, changed its kernels {drops} "
        f"times in {replays} replays{_FORCED}"
    )


def choice_line(config: RunConfig, *, device: str, world_size: int, environment: Mapping[str, str]) -> str | None:
    """Line above the first step of a run on GPUs; None where the config has no graphs."""
    if device != "cuda" or config.train.cuda_graphs is False:
        return None
    if config.train.cuda_graphs is True:
        return "CUDA graphs: one launch a step after the first three"
    obstacle = automatic_obstacle(config, device=device, world_size=world_size, environment=environment)
    return refused_line(obstacle) if obstacle else "CUDA graphs: after three steps, if memory allows"


def chosen_line(eager: int, captured: int, *, is_dropped: bool) -> str:
    """Line after the capture of a graph that "auto" chose, with the bytes of `growth_obstacle`; `is_dropped` before
    evaluations."""
    line = f"CUDA graphs: one launch a step from here on; {_gib(captured)} reserved, {_gib(eager)} by eager steps"
    return line + "; dropped before an evaluation, to make room for it, and captured again after it" * is_dropped


def refused_line(obstacle: str) -> str:
    """Line of a run for which "auto" chooses no graph."""
    return f"CUDA graphs: none: {obstacle}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
