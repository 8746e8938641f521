"""Seconds of a step (matmuls, other kernels, collectives, waits), and the bytes that each axis sends in it."""

from __future__ import annotations

from typing import NamedTuple

from megalin.parallel.config import ParallelConfig
from megalin.planner.block_traces import Trace
from megalin.planner.graph_cost import COPY, CollectiveCost
from megalin.planner.hardware import (
    ATTENTION_EFFICIENCY,
    COLLECTIVE_SECONDS,
    COPY_EFFICIENCY,
    FLOAT8_SPEEDUP,
    GPUS_PER_HOST,
    HOST_SECONDS,
    LINK_EFFICIENCY,
    MATRIX_EFFICIENCY,
    SIGNAL_SECONDS,
    Hardware,
)
from megalin.planner.parameters import StageParameters
from megalin.planner.workload import ParallelLayout

_UPDATE_BYTES = 24
"""Bytes per element and step for weight and moments, which AdamW reads and writes. It also writes the copy in the
compute dtype; norm and AdamW each read the gradient."""
_MAGNITUDE_BYTES = 4
"""Bytes per element and step to find the magnitudes of weights that are multiplied in FP8."""


class MicroBatchWork(NamedTuple):
    """Work of a pipeline rank for one micro-batch."""

    block_flops: float
    """Forward operations of its blocks, except attention."""
    attention_flops: float
    """Forward operations of its blocks that grow with the square of the length."""
    other_flops: float
    """Forward operations outside the blocks."""
    num_blocks: float
    """Number of blocks; part of a block counts by its fraction of the operations."""
    float8_flops: float = 0.0
    """Forward operations of its blocks' layers that multiply in FP8; among `block_flops`."""
    float8_passes: int = 0
    """Of forward, gradient of activations and gradient of weights, how many are in FP8."""


class StepTime(NamedTuple):
    """Seconds of a step of the slowest stage; the parts exclude overlapped time and add up to the step."""

    matmuls: float
    """Matmuls, scans and attention at the GPU's attained rates."""
    kernels: float
    """Reads and writes of all other kernels."""
    collectives: float
    """Waits for tensor- and context-parallel collectives, and for copies as far as matmuls do not hide them."""
    data_parallel: float
    """Exposed time of FSDP's all-gathers and reduce-scatters."""
    host: float
    """Waits for the host to launch kernels."""
    pipeline: float
    """Pipeline bubble."""
    update: float
    """Gradient norm, clipping and AdamW."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


class Sent(NamedTuple):
    """Bytes that a rank sends in a step, by axis."""

    tp: int
    cp: int
    data: int
    """Gathered weights and reduced gradients."""
    pp: int


class MicroBatchTraffic(NamedTuple):
    """Memory traffic and collectives of a pipeline rank for one micro-batch."""

    moved_bytes: int
    """Read and written by kernels other than matmuls, without recomputation."""
    waited: float
    """Seconds that matmuls wait for collectives."""
    tp_bytes: int
    """Sent over the tensor-parallel axis."""
    cp_bytes: int
    hidden_bytes: int
    """Sent to the next stage."""


def micro_batch_traffic(
    trace: Trace, kinds: list[int], parallel: ParallelConfig, hardware: Hardware, *, recompute: bool, rank: int
) -> MicroBatchTraffic:
    """Traffic of a pipeline rank; of `parallel` only tp, cp and pp are read.

    Args:
        kinds: for each block of the stage, its index in the trace's blocks.
        rank: on the pipeline axis; the first has the embedding and the input layers, the last the final norm.
    """
    again = int(recompute)
    around = [trace.entry] * (rank == 0) + [trace.exit] * (rank == parallel.pp - 1)
    moved = sum(cost.moved_bytes for cost in [*(trace.blocks[kind] for kind in kinds), *around])
    per_kind = [_traffic([*cost.forward * (1 + again), *cost.backward], parallel, hardware) for cost in trace.blocks]
    traffic = [per_kind[kind] for kind in kinds]
    traffic += [_traffic([*cost.forward, *cost.backward], parallel, hardware) for cost in around]
    waited = sum((seconds for each in traffic for seconds in each.waits), start=0.0)
    tp_bytes, cp_bytes = (sum(each.wire[axis] for each in traffic) for axis in ("tp", "cp"))
    return MicroBatchTraffic(moved, waited, tp_bytes, cp_bytes, trace.hidden_bytes)


def step_time(
    work: MicroBatchWork,
    parameters: StageParameters,
    traffic: MicroBatchTraffic,
    layout: ParallelLayout,
    hardware: Hardware,
    *,
    itemsize: int,
) -> tuple[StepTime, Sent]:
    """Step time and traffic of a pipeline rank; the slowest rank determines the run's.

    Args:
        itemsize: bytes of the compute dtype.
    """
    count, parallel, again = layout.num_micro_batches, layout.parallel, int(layout.recompute)
    matrix, memory = hardware.matrix_flops * MATRIX_EFFICIENCY, hardware.memory_bandwidth * hardware.memory_efficiency
    attention = work.attention_flops / (hardware.matrix_flops * ATTENTION_EFFICIENCY)
    matmuls = (3 + again) * (work.block_flops / matrix + attention) + 3 * work.other_flops / matrix
    matmuls -= (work.float8_passes + again) * work.float8_flops / matrix * (1 - 1 / FLOAT8_SPEEDUP)
    kernels = traffic.moved_bytes * (1 + again / 3) / memory
    device = matmuls + kernels + traffic.waited
    host = max(0.0, HOST_SECONDS * work.num_blocks * (1 + again / 3) - device)  # a third of the launches: the forward
    data_bytes, gathers = _data_bytes(parameters, layout, itemsize)
    hidden = (device + host) * (count if layout.zero >= 2 else 1)
    data_span = parallel.tp * layout.dp * parallel.cp
    rest = (itemsize + 4) * parameters.rest.whole if layout.dp * parallel.cp > 1 else 0
    sending = data_bytes / _bandwidth(hardware, data_span) + gathers * COLLECTIVE_SECONDS
    exposed = max(rest / _bandwidth(hardware, data_span), sending - hidden)
    wait = (parallel.pp - 1) / parallel.pp_stages_per_rank * (device + host)
    moved = _UPDATE_BYTES + 2 * layout.gradient_itemsize(itemsize) + (itemsize if itemsize < 4 else 0)
    moved += _MAGNITUDE_BYTES if work.float8_passes else 0
    update = moved * parameters.shard / memory
    time = StepTime(count * matmuls, count * kernels, count * traffic.waited, exposed, count * host, wait, update)
    pp_bytes = 2 * count * traffic.hidden_bytes * parallel.pp_stages_per_rank if parallel.pp > 1 else 0
    return time, Sent(count * traffic.tp_bytes, count * traffic.cp_bytes, data_bytes, pp_bytes)


class _Traffic(NamedTuple):
    """Collectives of a block, or around the blocks, for one micro-batch."""

    wire: dict[str, int]
    """Bytes that a rank sends, by axis."""
    waits: list[float]
    """Seconds that matmuls wait for each collective."""


def _traffic(collectives: list[CollectiveCost], parallel: ParallelConfig, hardware: Hardware) -> _Traffic:
    spans = {"tp": (parallel.tp, parallel.tp), "cp": (parallel.cp, parallel.cp * parallel.tp)}
    traffic = _Traffic({"tp": 0, "cp": 0}, [])
    for collective in collectives:
        size, span = spans[collective.group]
        wire = _wire_bytes(collective, size)
        traffic.wire[collective.group] += wire
        traffic.waits.append(_exposed_seconds(collective, wire, hardware, span))
    return traffic


def _wire_bytes(collective: CollectiveCost, size: int) -> int:
    """Bytes that a rank sends for a collective in a ring of `size` ranks."""
    if collective.name.startswith("all_gather"):
        return collective.bytes * (size - 1)
    return collective.bytes * (size - 1) * (2 if collective.name.startswith("all_reduce") else 1) // size


def _exposed_seconds(collective: CollectiveCost, wire: int, hardware: Hardware, span: int) -> float:
    """Seconds that matmuls wait for a collective of `wire` sent bytes in a group that spans `span` ranks."""
    if collective.name != COPY:
        return COLLECTIVE_SECONDS + wire / _bandwidth(hardware, span)
    overlapped = collective.overlapped_flops / (hardware.matrix_flops * MATRIX_EFFICIENCY)
    return SIGNAL_SECONDS + max(0.0, wire / (hardware.link_bandwidth * COPY_EFFICIENCY) - overlapped)


def _bandwidth(hardware: Hardware, span: int) -> float:
    """Bytes a second that a rank sends in a group that spans `span` neighbouring ranks."""
    return LINK_EFFICIENCY * (hardware.link_bandwidth if span <= GPUS_PER_HOST else hardware.network_bandwidth)


def _data_bytes(parameters: StageParameters, layout: ParallelLayout, itemsize: int) -> tuple[int, int]:
    """Bytes that a rank sends over the data axis in a step, and the number of collectives."""
    shard, count = layout.shard, layout.num_micro_batches
    replicas = layout.dp * layout.parallel.cp // shard
    whole = parameters.whole
    times_gathered = 0 if shard == 1 else 2 * count if layout.zero == 3 else 1
    times_reduced = 0 if shard == 1 else count if layout.zero >= 2 else 1
    sent = (times_gathered * itemsize + times_reduced * 4) * whole * (shard - 1) // shard
    sent += 2 * 4 * parameters.shard * (replicas - 1) // replicas
    units = len(parameters.blocks) + 2
    return sent, units * (times_gathered + times_reduced + int(replicas > 1))
