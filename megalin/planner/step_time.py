"""Seconds of a step (matmuls, other kernels, collectives, waits), and the bytes that each axis sends in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megalin.planner.block_traces import Trace
from megalin.planner.graph_cost import COPY, CollectiveCost
from megalin.planner.hardware import (
    ATTENTION_SHARE,
    COLLECTIVE_SECONDS,
    COPY_SHARE,
    GPUS_PER_HOST,
    HOST_SECONDS,
    LINK_SHARE,
    MATRIX_SHARE,
    MEMORY_SHARE,
    SIGNAL_SECONDS,
    Hardware,
)
from megalin.planner.parameters import StageParameters
from megalin.planner.workload import ParallelLayout

_UPDATE_BYTES = 36
"""Of an element in a step: the norm reads its gradient, clipping reads and writes it, AdamW reads weight, gradient and
moments and writes all but the gradient."""


class MicroBatchWork(NamedTuple):
    """What a rank of the pipeline does for one micro-batch."""

    block_flops: float
    """Operations of its blocks' forward, but for attention."""
    attention_flops: float
    """Operations of its blocks' forward that grow with the square of the length."""
    other_flops: float
    """Operations of the forward around them."""
    num_blocks: float
    """A part of one counts as its share of the operations."""


class StepTime(NamedTuple):
    """Seconds of a step, of the slowest stage; the parts add up but for what overlaps."""

    matmuls: float
    """Matmuls, scans and attention at the GPU's attained rates."""
    kernels: float
    """Reads and writes of all other kernels."""
    collectives: float
    """Waits for tensor- and context-parallel collectives, and for copies as far as matmuls do not hide them."""
    data_parallel: float
    """What of gathering weights and reducing gradients no computation hides."""
    host: float
    """What the device waits for the host that starts its kernels."""
    pipeline: float
    """Waiting at both ends of the pipeline."""
    update: float
    """Norm, clipping and AdamW."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Sent(NamedTuple):
    """Bytes that a rank sends in a step, by axis."""

    tp: int
    cp: int
    data: int
    """Gathered weights and reduced gradients."""
    pp: int


def step_time(
    work: MicroBatchWork,
    parameters: StageParameters,
    trace: Trace,
    kinds: list[int],
    layout: ParallelLayout,
    chip: Hardware,
    *,
    rank: int,
    itemsize: int,
) -> tuple[StepTime, Sent]:
    """The step of one stage's ranks; the slowest stage's is the run's.

    Args:
        kinds: for each block of the stage, its entry in the trace.
        rank: on the pipeline axis: the first has the embedding and the input layers, the last the last norm.
        itemsize: bytes of the compute dtype.
    """
    count, parallel, again = layout.num_micro_batches, layout.parallel, int(layout.recompute)
    matrix, memory = chip.matrix_flops * MATRIX_SHARE, chip.memory_bandwidth * MEMORY_SHARE
    attention = work.attention_flops / (chip.matrix_flops * ATTENTION_SHARE)
    matmuls = (3 + again) * (work.block_flops / matrix + attention) + 3 * work.other_flops / matrix
    around = [trace.entry] * (rank == 0) + [trace.exit] * (rank == parallel.pp - 1)
    moved = sum(cost.moved_bytes for cost in [*(trace.blocks[kind] for kind in kinds), *around])
    kernels = moved * (1 + again / 3) / memory
    exchanged = [exchange for kind in kinds for exchange in _exchanges(trace, kind, again)]
    exchanged += [exchange for cost in around for exchange in [*cost.forward, *cost.backward]]
    spans = {"tp": (parallel.tp, parallel.tp), "cp": (parallel.cp, parallel.cp * parallel.tp)}
    sent, waited = {"tp": 0, "cp": 0}, 0.0
    for exchange in exchanged:
        size, span = spans[exchange.group]
        wire = _wire_bytes(exchange, size)
        sent[exchange.group] += count * wire
        waited += _waited(exchange, wire, chip, span)
    device = matmuls + kernels + waited
    host = max(0.0, HOST_SECONDS * work.num_blocks - device)
    data_bytes, gathers = _data_bytes(parameters, layout, itemsize)
    hidden = (device + host) * (count if layout.zero >= 2 else 1)
    data_span = parallel.tp * layout.dp * parallel.cp
    rest = (itemsize + 4) * parameters.rest.whole if layout.dp * parallel.cp > 1 else 0
    sending = data_bytes / _bandwidth(chip, data_span) + gathers * COLLECTIVE_SECONDS
    exposed = max(rest / _bandwidth(chip, data_span), sending - hidden)
    wait = (parallel.pp - 1) / parallel.pp_stages_per_rank * (device + host)
    update = _UPDATE_BYTES * parameters.shard / memory
    time = StepTime(count * matmuls, count * kernels, count * waited, exposed, count * host, wait, update)
    stream = 2 * count * trace.hidden_bytes * parallel.pp_stages_per_rank if parallel.pp > 1 else 0
    return time, Sent(sent["tp"], sent["cp"], data_bytes, stream)


def _exchanges(trace: Trace, kind: int, again: int) -> Iterable[CollectiveCost]:
    cost = trace.blocks[kind]
    return [*cost.forward * (1 + again), *cost.backward]


def _wire_bytes(exchange: CollectiveCost, size: int) -> int:
    """What a rank sends in a ring of `size` ranks."""
    if exchange.collective.startswith("all_gather"):
        return exchange.bytes * (size - 1)
    return exchange.bytes * (size - 1) * (2 if exchange.collective.startswith("all_reduce") else 1) // size


def _waited(exchange: CollectiveCost, wire: int, chip: Hardware, span: int) -> float:
    """Seconds for which the products of a rank wait, that sends `wire` bytes in a group over `span` ranks."""
    if exchange.collective != COPY:
        return COLLECTIVE_SECONDS + wire / _bandwidth(chip, span)
    beside = exchange.overlapped_flops / (chip.matrix_flops * MATRIX_SHARE)
    return SIGNAL_SECONDS + max(0.0, wire / (chip.link_bandwidth * COPY_SHARE) - beside)


def _bandwidth(chip: Hardware, span: int) -> float:
    """Bytes a second a rank sends in a group that reaches over `span` neighbouring ranks."""
    return LINK_SHARE * (chip.link_bandwidth if span <= GPUS_PER_HOST else chip.network_bandwidth)


def _data_bytes(parameters: StageParameters, layout: ParallelLayout, itemsize: int) -> tuple[int, int]:
    """What a rank sends over the data axis in a step, and in how many collectives."""
    shard, count = layout.shard, layout.num_micro_batches
    replicas = layout.dp * layout.parallel.cp // shard
    whole = parameters.whole
    times_gathered = 0 if shard == 1 else 2 * count if layout.zero == 3 else 1
    times_reduced = 0 if shard == 1 else count if layout.zero >= 2 else 1
    sent = (times_gathered * itemsize + times_reduced * 4) * whole * (shard - 1) // shard
    sent += 2 * 4 * parameters.shard * (replicas - 1) // replicas
    units = len(parameters.blocks) + 2
    return sent, units * (times_gathered + times_reduced + int(replicas > 1))
