"""Memory and time of one layout: of the rank that needs the most memory and of the slowest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from torch import nn

from megalin.model.base import Stage
from megalin.model.language_model import LanguageModel
from megalin.model.pipeline_stages import cut_stages
from megalin.parallel.collectives import Axis
from megalin.parallel.config import ParallelConfig
from megalin.parallel.fake_mesh import LocalTensorParallel
from megalin.parallel.float8_layers import wide_linears
from megalin.planner.block_traces import Trace, extrapolate, kinds, scaled_cost, trace_model, uses_async_tp
from megalin.planner.hardware import Hardware
from megalin.planner.memory import Memory, stage_memory
from megalin.planner.parameters import StageParameters, merge_stages, stage_parameters
from megalin.planner.step_time import MicroBatchTraffic, MicroBatchWork, Sent, StepTime, micro_batch_traffic, step_time
from megalin.planner.workload import ParallelLayout, Workload


class Estimate(NamedTuple):
    """A layout with its predicted memory, step time and traffic."""

    layout: ParallelLayout
    memory: Memory
    """Of the pipeline rank with the highest peak."""
    time: StepTime
    """Of the slowest pipeline rank."""
    sent: Sent
    """By the slowest pipeline rank."""
    tokens_per_second: float
    """Over all ranks."""


class _Part(NamedTuple):
    """The sub-layers of one block that belong to a stage, usually all."""

    kind: int
    """Index of the block's entry in `model.layers`."""
    sublayers: tuple[int, ...]
    """Their indices in the block."""


class _OwnBlocks(NamedTuple):
    """The blocks of a pipeline rank."""

    parts: list[_Part]
    distinct: tuple[_Part, ...]
    """Its parts, each once."""
    kinds: list[int]
    """For each part its index in `distinct`."""
    attention_flops: float
    """Forward operations per token."""
    other_flops: float
    float8_flops: float
    """Those of `other_flops` in layers that multiply in FP8."""
    num_blocks: float
    """Part of a block counts by its fraction of the operations."""


class _Ranks(NamedTuple):
    """The ranks of a pipeline."""

    parameters: list[StageParameters]
    critical: list[int]
    """Ranks that can be the largest or slowest."""
    model_state_bytes: int
    """Of the rank with most."""


class _Operations(NamedTuple):
    """Forward operations per token of a sub-layer."""

    attention: float
    other: float
    float8: int
    """Those of `other` in layers that multiply in FP8."""

    @property
    def total(self) -> float:
        """All operations."""
        return self.attention + self.other


class Estimator:
    """Estimates the layouts of a workload; caches modules and traces, which many layouts share.

    Attributes:
        partitions: sub-layers of each stage, by the numbers of ranks and of stages of the pipeline; filled on demand.
        on_estimate: called after each estimate, for a display of progress.
    """

    def __init__(
        self, workload: Workload, hardware: Hardware, *, on_estimate: Callable[[], None] = lambda: None
    ) -> None:
        self.workload, self.hardware, self.on_estimate = workload, hardware, on_estimate
        self.partitions: dict[tuple[int, int], list[range]] = {(1, 1): [range(workload.model.num_sublayers)]}
        self._kinds = kinds(workload.model.layers)
        self._modules: dict[tuple[object, ...], LanguageModel] = {}
        self._ranks: dict[tuple[int, int, int, int], _Ranks] = {}
        self._traffic: dict[tuple[object, ...], MicroBatchTraffic] = {}
        self._traces: dict[tuple[object, ...], Trace] = {}
        self._own: dict[tuple[int, int, int], _OwnBlocks] = {}

    def model_state_bytes(self, layout: ParallelLayout) -> int:
        """Sharded fp32 weights, gradients, both moments and the state of update hooks, of the rank with most: a lower
        bound of every step."""
        return self._ranks_of(layout).model_state_bytes

    def estimate(self, layout: ParallelLayout, *, refined: bool) -> Estimate:
        """Estimates `layout`: `refined` from a trace of its own micro-batch, compiled if the workload is; if not, from
        eager traces of one and two samples, which is faster."""
        itemsize, parallel = self.workload.dtype.itemsize, layout.parallel
        memories, times = [], []
        ranks = self._ranks_of(layout)
        for rank in ranks.critical:
            own, stage = self._own_blocks(parallel, rank), ranks.parameters[rank]
            trace = self._own_trace(layout, own.distinct, refined=refined)
            hook_bytes = self.workload.hook_bytes(stage.shard)
            memories.append(
                stage_memory(stage, trace, own.kinds, layout, rank=rank, itemsize=itemsize, hook_bytes=hook_bytes)
            )
            work, traffic = self._work(layout, own, rank), self._traffic_of(layout, trace, own, rank, refined=refined)
            times.append(step_time(work, stage, traffic, layout, self.hardware, itemsize=itemsize))
        time, sent = max(times, key=lambda each: each[0].total)
        tokens = self.workload.global_batch_size * self.workload.length
        memory = max(memories, key=lambda each: each.total)
        self.on_estimate()
        return Estimate(layout, memory, time, sent, tokens / time.total)

    def parameters(self, layout: ParallelLayout) -> list[StageParameters]:
        """Parameter counts of each rank of the pipeline."""
        return self._ranks_of(layout).parameters

    def _ranks_of(self, layout: ParallelLayout) -> _Ranks:
        parallel = layout.parallel
        key = (parallel.tp, parallel.pp, parallel.pp_stages_per_rank, layout.shard)
        if key not in self._ranks:
            stages = self._stages(parallel.tp, parallel.pp, parallel.pp * parallel.pp_stages_per_rank)
            counted = {stage: stage_parameters(stage, layout.shard) for stage in dict.fromkeys(stages)}
            parameters = [
                merge_stages([counted[stage] for stage in stages[rank :: parallel.pp]]) for rank in range(parallel.pp)
            ]
            shards = {each.shard for each in parameters}
            states = max(16 * shard + self.workload.hook_bytes(shard) for shard in shards)
            self._ranks[key] = _Ranks(parameters, _critical_ranks(parameters), states)
        return self._ranks[key]

    def partition(self, num_ranks: int, num_stages: int) -> list[range]:
        """Sub-layers of each stage. Raises ConfigError if the model has too few sub-layers that can end a stage."""
        if (num_ranks, num_stages) not in self.partitions:
            length = self.workload.length
            sublayers = cut_stages(self._whole, num_stages, num_ranks=num_ranks, length=length)
            self.partitions[num_ranks, num_stages] = sublayers
        return self.partitions[num_ranks, num_stages]

    def _stages(self, tp: int, num_ranks: int, num_stages: int) -> list[LanguageModel]:
        """The stages on meta; those of equal blocks between the first and the last are one module."""
        stages = []
        for number, sublayers in enumerate(self.partition(num_ranks, num_stages)):
            stage = Stage(number, num_stages, sublayers)
            key = (tp, stage.is_first, stage.is_last, *self._parts(sublayers))
            if key not in self._modules:
                axis = LocalTensorParallel(Axis("tp", tp))
                self._modules[key] = LanguageModel(self.workload.model, axis, stage=stage)
            stages.append(self._modules[key])
        return stages

    def _parts(self, stage: range) -> list[_Part]:
        """The blocks of a stage, each with its sub-layers in the stage."""
        parts, start = [], 0
        for kind in self._kinds:
            end = start + len(self._operations[kind])
            if own := range(max(start, stage.start), min(end, stage.stop)):
                parts.append(_Part(kind, tuple(number - start for number in own)))
            start = end
        return parts

    def _own_blocks(self, parallel: ParallelConfig, rank: int) -> _OwnBlocks:
        """The rank's blocks, each with the sub-layers in the rank's stages."""
        key = (parallel.pp, parallel.pp_stages_per_rank, rank)
        if key not in self._own:
            stages = self.partition(parallel.pp, parallel.pp * parallel.pp_stages_per_rank)[rank :: parallel.pp]
            parts = [part for stage in stages for part in self._parts(stage)]
            distinct = tuple(dict.fromkeys(parts))
            each = [self._operations[part.kind][index] for part in parts for index in part.sublayers]
            attention, other, float8 = (sum(flops) for flops in zip(*each, strict=True))
            fractions = {part: self._fraction(part) for part in distinct}
            num_blocks = sum(fractions[part] for part in parts)
            kinds_of_parts = [distinct.index(part) for part in parts]
            self._own[key] = _OwnBlocks(parts, distinct, kinds_of_parts, attention, other, float8, num_blocks)
        return self._own[key]

    def _fraction(self, part: _Part) -> float:
        """Fraction of its block's operations."""
        whole = self._operations[part.kind]
        return sum(whole[index].total for index in part.sublayers) / sum(each.total for each in whole)

    @cached_property
    def _operations(self) -> list[list[_Operations]]:
        """Operations of each sub-layer of a block of each kind.

        Attention is the increase per token when the length doubles. In a causal sequence of T tokens about T / 2 are
        visible to a token, while the model's own count has all pairs.
        """
        length, blocks = self.workload.length, self._whole.block_list()
        first = [blocks[self._kinds.index(kind)] for kind in range(len(self.workload.model.layers))]
        found = []
        for block in first:
            counted = [(mixer.flops(length), mixer.flops(2 * length), self._float8(mixer)) for mixer in block.mixers()]
            found.append([_Operations((twice - once) / 2, 2 * once - twice, float8) for once, twice, float8 in counted])
        return found

    def _float8(self, mixer: nn.Module) -> int:
        """Operations of a mixer's layers that multiply in FP8."""
        settings = self.workload.float8
        return 0 if settings is None else 2 * sum(each.weight.numel() for each in wide_linears(mixer, settings))

    @cached_property
    def _operations_around(self) -> int:
        """Forward operations per token outside the blocks."""
        length = self.workload.length
        return self._whole.forward_flops(length) - sum(mixer.flops(length) for mixer in self._whole.mixers())

    @cached_property
    def _whole(self) -> LanguageModel:
        return LanguageModel(self.workload.model)

    def _work(self, layout: ParallelLayout, own: _OwnBlocks, rank: int) -> MicroBatchWork:
        parallel = layout.parallel
        tokens = layout.micro_batch_size * self.workload.length / (parallel.tp * parallel.cp)
        around = self._operations_around if rank == parallel.pp - 1 else 0
        settings = self.workload.float8
        return MicroBatchWork(
            tokens * own.other_flops,
            tokens * own.attention_flops,
            tokens * around,
            own.num_blocks,
            tokens * own.float8_flops,
            0 if settings is None else 2 + settings.weight_gradient,
        )

    def _traffic_of(
        self, layout: ParallelLayout, trace: Trace, own: _OwnBlocks, rank: int, *, refined: bool
    ) -> MicroBatchTraffic:
        """Traffic of one of the rank's micro-batches, which ZeRO and the number of micro-batches do not change."""
        parallel, recompute = layout.parallel, layout.recompute
        axes = (*self._trace_key(parallel, refined=refined), parallel.pp, parallel.pp_stages_per_rank, rank)
        key = (*axes, layout.micro_batch_size, recompute, refined)
        if key not in self._traffic:
            self._traffic[key] = micro_batch_traffic(
                trace, own.kinds, parallel, self.hardware, recompute=recompute, rank=rank
            )
        return self._traffic[key]

    def _own_trace(self, layout: ParallelLayout, parts: tuple[_Part, ...], *, refined: bool) -> Trace:
        """The trace of a micro-batch with the costs of `parts` as its blocks."""
        key = (*self._trace_key(layout.parallel, refined=refined), layout.micro_batch_size, parts, refined)
        if key not in self._traces:
            trace = self._trace(layout, refined=refined)
            costs = [scaled_cost(trace.blocks[part.kind], self._fraction(part)) for part in parts]
            self._traces[key] = trace._replace(blocks=costs)
        return self._traces[key]

    def _trace(self, layout: ParallelLayout, *, refined: bool) -> Trace:
        parallel, size = layout.parallel, layout.micro_batch_size
        workload = self.workload if refined else self.workload._replace(compiled=False)
        axes = self._trace_key(parallel, refined=refined)

        def of(batch: int) -> Trace:
            key = (*axes, batch)
            if key not in self._traces:
                self._traces[key] = trace_model(workload, parallel, batch)
            return self._traces[key]

        return of(size) if refined or size <= 2 else extrapolate(of(1), of(2), size)

    def _trace_key(self, parallel: ParallelConfig, *, refined: bool) -> tuple[object, ...]:
        """All that a trace depends on, except its batch."""
        axes = (parallel.tp, parallel.cp, parallel.cp_exchange, parallel.sequence_parallel, uses_async_tp(parallel))
        return (*axes, refined and self.workload.compiled)


def _critical_ranks(parts: list[StageParameters]) -> list[int]:
    """Pipeline ranks that can be the largest or slowest: the first (most micro-batches in flight), the last (the head)
    and the one with the largest blocks."""
    most = max(range(len(parts)), key=lambda rank: sum(unit.whole for unit in parts[rank].blocks))
    return sorted({0, most, len(parts) - 1})
