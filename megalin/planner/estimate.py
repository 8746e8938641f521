"""Memory and time of one layout, of the ranks that hold most and that take longest."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from megalin.model.base import Stage
from megalin.model.language_model import LanguageModel
from megalin.model.pipeline_stages import plan_stages
from megalin.parallel.collectives import Axis
from megalin.parallel.fake_mesh import LocalTensorParallel
from megalin.parallel.mesh import ParallelConfig
from megalin.planner.block_traces import Trace, kinds, part_of, stretched, trace_model, uses_async_tp
from megalin.planner.hardware import Hardware
from megalin.planner.memory import Memory, stage_memory
from megalin.planner.parameters import StageParameters, joined, stage_parameters
from megalin.planner.step_time import MicroBatchWork, Sent, StepTime, step_time
from megalin.planner.workload import ParallelLayout, Workload


class Estimate(NamedTuple):
    """A layout, and what it needs."""

    layout: ParallelLayout
    memory: Memory
    """Of the rank of the pipeline that holds most."""
    time: StepTime
    """Of the one that takes longest."""
    sent: Sent
    """By that one."""
    tokens_per_second: float
    """Of all ranks."""


class _Part(NamedTuple):
    """Sub-layers of a block that a stage has, mostly all."""

    kind: int
    """The entry of `model.layers` that the block is of."""
    sublayers: tuple[int, ...]
    """By their numbers in the block."""


class _Operations(NamedTuple):
    """Forward operations a token of sub-layers."""

    attention: float
    other: float


class Estimator:
    """Estimates of a workload's layouts; modules and traces are kept, since many layouts share them.

    Attributes:
        cuts: the sub-layers of each stage, by the ranks and the stages of a pipeline; those not yet there are planned.
    """

    def __init__(self, workload: Workload, chip: Hardware) -> None:
        self.workload, self.chip = workload, chip
        self.cuts: dict[tuple[int, int], list[range]] = {(1, 1): [range(workload.model.num_sublayers)]}
        self._kinds = kinds(workload.model.layers)
        self._modules: dict[tuple[int, int, int], list[LanguageModel]] = {}
        self._parameters: dict[tuple[int, int, int, int], list[StageParameters]] = {}
        self._traces: dict[tuple[object, ...], Trace] = {}

    def resting_bytes(self, layout: ParallelLayout) -> int:
        """fp32 weights, gradients and both moments as shards, of the rank that has most: no step needs less."""
        return max(16 * parameters.shard for parameters in self.parameters(layout))

    def estimate(self, layout: ParallelLayout, *, closely: bool) -> Estimate:
        """What `layout` needs: by a trace of its own micro-batch as the workload's blocks run, or, not `closely`, by
        eager traces of one and two samples."""
        trace = self._trace(layout, closely=closely)
        itemsize, parallel = self.workload.dtype.itemsize, layout.parallel
        memories, times = [], []
        parts = self.parameters(layout)
        for rank in _telling_ranks(parts):
            own = self._own_blocks(parallel, rank)
            distinct = [*dict.fromkeys(own)]
            of_own = trace._replace(blocks=[part_of(trace.blocks[part.kind], self._share(part)) for part in distinct])
            of = [distinct.index(part) for part in own]
            memories.append(stage_memory(parts[rank], of_own, of, layout, rank=rank, itemsize=itemsize))
            work = self._work(layout, own, parallel, rank)
            times.append(step_time(work, parts[rank], of_own, of, layout, self.chip, rank=rank, itemsize=itemsize))
        time, sent = max(times, key=lambda each: each[0].total)
        tokens = self.workload.global_batch_size * self.workload.length
        memory = max(memories, key=lambda each: each.total)
        return Estimate(layout, memory, time, sent, tokens / time.total)

    def parameters(self, layout: ParallelLayout) -> list[StageParameters]:
        """What each rank of the pipeline holds."""
        parallel = layout.parallel
        key = (parallel.tp, parallel.pp, parallel.pp_stages_per_rank, layout.shard)
        if key not in self._parameters:
            stages = self._stages(parallel.tp, parallel.pp, parallel.pp * parallel.pp_stages_per_rank)
            self._parameters[key] = [
                joined([stage_parameters(stage, layout.shard) for stage in stages[rank :: parallel.pp]])
                for rank in range(parallel.pp)
            ]
        return self._parameters[key]

    def cut(self, num_ranks: int, num_stages: int) -> list[range]:
        """The sub-layers of each stage. Raises ConfigError where the model has fewer to cut behind."""
        if (num_ranks, num_stages) not in self.cuts:
            plan = plan_stages(self.workload.model, num_stages, num_ranks=num_ranks, length=self.workload.length)
            self.cuts[num_ranks, num_stages] = plan.sublayers
        return self.cuts[num_ranks, num_stages]

    def _stages(self, tp: int, num_ranks: int, num_stages: int) -> list[LanguageModel]:
        key = (tp, num_ranks, num_stages)
        if key not in self._modules:
            axis = LocalTensorParallel(Axis("tp", tp))
            self._modules[key] = [
                LanguageModel(self.workload.model, axis, stage=Stage(number, num_stages, sublayers))
                for number, sublayers in enumerate(self.cut(num_ranks, num_stages))
            ]
        return self._modules[key]

    def _own_blocks(self, parallel: ParallelConfig, rank: int) -> list[_Part]:
        """What the rank's stages have of each of their blocks."""
        found = []
        for stage in self.cut(parallel.pp, parallel.pp * parallel.pp_stages_per_rank)[rank :: parallel.pp]:
            start = 0
            for kind in self._kinds:
                end = start + len(self._operations[kind])
                if own := range(max(start, stage.start), min(end, stage.stop)):
                    found.append(_Part(kind, tuple(number - start for number in own)))
                start = end
        return found

    def _share(self, part: _Part) -> float:
        """Of the operations of its block."""
        whole = self._operations[part.kind]
        return sum(sum(whole[index]) for index in part.sublayers) / sum(sum(each) for each in whole)

    @cached_property
    def _operations(self) -> list[list[_Operations]]:
        """Of each sub-layer of a block of each kind.

        Attention is what a sequence of twice the length adds to a token. Of its T tokens a causal sequence shows each
        about T / 2, where a model's own count has all pairs.
        """
        length, blocks = self.workload.length, self._whole.block_list()
        first = [blocks[self._kinds.index(kind)] for kind in range(len(self.workload.model.layers))]
        found = []
        for block in first:
            counted = [(mixer.flops(length), mixer.flops(2 * length)) for mixer in block.mixers()]
            found.append([_Operations((twice - once) / 2, 2 * once - twice) for once, twice in counted])
        return found

    @cached_property
    def _operations_around(self) -> int:
        """Forward operations a token of what stands around the blocks."""
        length = self.workload.length
        return self._whole.forward_flops(length) - sum(mixer.flops(length) for mixer in self._whole.mixers())

    @cached_property
    def _whole(self) -> LanguageModel:
        return LanguageModel(self.workload.model)

    def _work(self, layout: ParallelLayout, own: list[_Part], parallel: ParallelConfig, rank: int) -> MicroBatchWork:
        tokens = layout.micro_batch_size * self.workload.length / (parallel.tp * parallel.cp)
        around = self._operations_around if rank == parallel.pp - 1 else 0
        each = [self._operations[part.kind][index] for part in own for index in part.sublayers]
        attention, other = (tokens * sum(kind) for kind in zip(*each, strict=True))
        return MicroBatchWork(other, attention, tokens * around, sum(map(self._share, own)))

    def _trace(self, layout: ParallelLayout, *, closely: bool) -> Trace:
        parallel, size = layout.parallel, layout.micro_batch_size
        workload = self.workload if closely else self.workload._replace(compiled=False)
        axes = (parallel.tp, parallel.cp, parallel.cp_exchange, parallel.sequence_parallel, uses_async_tp(parallel))

        def of(batch: int) -> Trace:
            key = (*axes, workload.compiled, batch)
            if key not in self._traces:
                self._traces[key] = trace_model(workload, parallel, batch)
            return self._traces[key]

        return of(size) if closely or size <= 2 else stretched(of(1), of(2), size)


def _telling_ranks(parts: list[StageParameters]) -> list[int]:
    """The first rank of a pipeline, which has most micro-batches in flight, the last, which has the head, and the one
    whose blocks are largest."""
    most = max(range(len(parts)), key=lambda rank: sum(unit.whole for unit in parts[rank].blocks))
    return sorted({0, most, len(parts) - 1})
