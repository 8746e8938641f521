"""Memory and time of one layout, of the ranks that hold most and that take longest."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from megalin.model.language_model import LanguageModel
from megalin.model.stack import Stage
from megalin.model.stages import plan_stages
from megalin.parallel.collectives import Axis
from megalin.parallel.fake import LocalTensorParallel
from megalin.parallel.mesh import ParallelConfig
from megalin.scaling.chips import Chip
from megalin.scaling.memory import Memory, stage_memory
from megalin.scaling.parameters import StageParameters, joined, stage_parameters
from megalin.scaling.step_time import Sent, StepTime, Work, step_time
from megalin.scaling.traces import Trace, kinds, stretched, trace_model
from megalin.scaling.workload import Layout, Workload


class Estimate(NamedTuple):
    """A layout, and what it needs."""

    layout: Layout
    memory: Memory
    """Of the rank of the pipeline that holds most."""
    time: StepTime
    """Of the one that takes longest."""
    sent: Sent
    """By that one."""
    tokens_per_second: float
    """Of all ranks."""


class Estimator:
    """Estimates of a workload's layouts; modules and traces are kept, since many layouts share them."""

    def __init__(self, workload: Workload, chip: Chip) -> None:
        self.workload, self.chip = workload, chip
        self._kinds = kinds(workload.model.layers)
        self._cuts: dict[int, list[range]] = {1: [range(workload.model.num_layers)]}
        self._modules: dict[tuple[int, int], list[LanguageModel]] = {}
        self._parameters: dict[tuple[int, int, int, int], list[StageParameters]] = {}
        self._traces: dict[tuple[object, ...], Trace] = {}

    def resting_bytes(self, layout: Layout) -> int:
        """fp32 weights, gradients and both moments as shards, of the rank that has most: no step needs less."""
        return max(16 * parameters.shard for parameters in self.parameters(layout))

    def estimate(self, layout: Layout, *, closely: bool) -> Estimate:
        """What `layout` needs: by a trace of its own micro-batch as the workload's blocks run, or, not `closely`, by
        eager traces of one and two samples."""
        trace = self._trace(layout, closely=closely)
        itemsize, parallel = self.workload.dtype.itemsize, layout.parallel
        memories, times = [], []
        parts = self.parameters(layout)
        for rank in _telling_ranks(parts):
            own = self._own_layers(parallel, rank)
            of = [self._kinds[layer] for layer in own]
            memories.append(stage_memory(parts[rank], trace, of, layout, rank=rank, itemsize=itemsize))
            work = self._work(layout, of, parallel, rank)
            times.append(step_time(work, parts[rank], trace, of, layout, self.chip, rank=rank, itemsize=itemsize))
        time, sent = max(times, key=lambda each: each[0].total)
        tokens = self.workload.global_batch_size * self.workload.length
        memory = max(memories, key=lambda each: each.total)
        return Estimate(layout, memory, time, sent, tokens / time.total)

    def parameters(self, layout: Layout) -> list[StageParameters]:
        """What each rank of the pipeline holds."""
        parallel = layout.parallel
        key = (parallel.tp, parallel.pp, parallel.pp_stages, layout.shard)
        if key not in self._parameters:
            stages = self._stages(parallel.tp, parallel.pp * parallel.pp_stages)
            self._parameters[key] = [
                joined([stage_parameters(stage, layout.shard) for stage in stages[rank :: parallel.pp]])
                for rank in range(parallel.pp)
            ]
        return self._parameters[key]

    def cut(self, count: int) -> list[range]:
        """The layers of each of `count` stages. Raises ConfigError where the model has fewer layers."""
        if count not in self._cuts:
            self._cuts[count] = plan_stages(self.workload.model, count, length=self.workload.length).layers
        return self._cuts[count]

    def _stages(self, tp: int, count: int) -> list[LanguageModel]:
        if (tp, count) not in self._modules:
            axis = LocalTensorParallel(Axis("tp", tp))
            self._modules[tp, count] = [
                LanguageModel(self.workload.model, axis, stage=Stage(number, count, layers))
                for number, layers in enumerate(self.cut(count))
            ]
        return self._modules[tp, count]

    def _own_layers(self, parallel: ParallelConfig, rank: int) -> list[int]:
        stages = self.cut(parallel.pp * parallel.pp_stages)[rank :: parallel.pp]
        return [layer for stage in stages for layer in stage]

    @cached_property
    def _flops(self) -> tuple[list[int], list[float], int]:
        """Forward operations a token: of a block of each kind but for attention, of its attention, and of what stands
        around the blocks.

        Attention is what a sequence of twice the length adds to a token. Of its T tokens a causal sequence shows each
        about T / 2, where a model's own count has all pairs.
        """
        model, length = LanguageModel(self.workload.model), self.workload.length
        blocks = model.block_list()
        first = [blocks[self._kinds.index(kind)] for kind in range(len(self.workload.model.layers))]
        counted, of_twice = (
            [sum(mixer.flops(tokens) for mixer in block.mixers()) for block in first] for tokens in (length, 2 * length)
        )
        pairs = [twice - once for twice, once in zip(of_twice, counted, strict=True)]
        around = model.forward_flops(length) - sum(counted[kind] for kind in self._kinds)
        others = [once - of_pairs for once, of_pairs in zip(counted, pairs, strict=True)]
        return others, [of_pairs / 2 for of_pairs in pairs], around

    def _work(self, layout: Layout, of: list[int], parallel: ParallelConfig, rank: int) -> Work:
        tokens = layout.micro_batch_size * self.workload.length / (parallel.tp * parallel.cp)
        each, attention, around = self._flops
        other = around if rank == parallel.pp - 1 else 0
        own, of_pairs = (sum(flops[kind] for kind in of) for flops in (each, attention))
        return Work(tokens * own, tokens * of_pairs, tokens * other, len(of))

    def _trace(self, layout: Layout, *, closely: bool) -> Trace:
        parallel, size = layout.parallel, layout.micro_batch_size
        workload = self.workload if closely else self.workload._replace(compiled=False)
        axes = (parallel.tp, parallel.cp, parallel.cp_exchange, parallel.sequence_parallel)

        def of(batch: int) -> Trace:
            key = (*axes, workload.compiled, batch)
            if key not in self._traces:
                self._traces[key] = trace_model(workload, parallel, batch)
            return self._traces[key]

        return of(size) if closely or size <= 2 else stretched(of(1), of(2), size)


def _telling_ranks(parts: list[StageParameters]) -> list[int]:
    """The first rank of a pipeline, which has most micro-batches in flight, the last, which has the head, and the one
    with most blocks."""
    most = max(range(len(parts)), key=lambda rank: len(parts[rank].blocks))
    return sorted({0, most, len(parts) - 1})
