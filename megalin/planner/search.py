"""Which layouts a workload fits: every one is tried, the fastest are told, and each refusal has its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.parallel.async_tensor_parallel import TPOverlapName
from megalin.parallel.mesh import ParallelConfig
from megalin.planner.estimate import Estimate, Estimator
from megalin.planner.hardware import GPUS_PER_HOST
from megalin.planner.workload import ParallelLayout, Workload, one_of_each
from megalin.train.config import check_model

LEAST_TOKENS = 1024
"""Tokens of a row that a rank keeps at least where rows are split; with fewer, ranks would mostly exchange."""
RESERVED_SHARE = 0.08
"""Of a GPU's memory, left to CUDA's context, NCCL's buffers and the allocator's gaps; chosen, not measured."""
_EAGER_EXCESS = 1.25
"""How much more than a compiled block an eager one may seem to need and still be looked at closely."""


class InfeasibleLayout(NamedTuple):
    """A layout, or all of a mesh, that cannot run."""

    layout: str
    reason: str
    kind: str
    """What such refusals have in common."""
    missing_bytes: int = 0
    """What memory it lacks."""


class Plan(NamedTuple):
    """What a search found."""

    best: list[Estimate]
    """The fastest layout of each mesh, fastest first."""
    refusals: list[InfeasibleLayout]
    num_layouts: int
    """Layouts that were looked at."""


class Limits(NamedTuple):
    """What a search has at hand."""

    gpus: int
    memory_bytes: int
    """Of a GPU, for tensors (`for_tensors`)."""
    sequence_parallel: bool = False
    """Whether layouts with tp > 1 are those with sequence parallelism alone, not those without it too."""
    tp_overlap: TPOverlapName = "auto"
    """How the stream of those reaches products."""


def for_tensors(memory_bytes: int) -> int:
    """What tensors may fill of a GPU's memory: all but RESERVED_SHARE of it."""
    return int(memory_bytes * (1 - RESERVED_SHARE))


def search(estimator: Estimator, limits: Limits, *, count: int) -> Plan:
    """The fastest layouts that fit, one a mesh (tp, cp, pp), at most `count`.

    A first pass reads eager blocks of one and two samples, which is quick; a second reads the fastest of what may fit
    as the workload has them, so that only what was read closely is named as fitting.
    """
    refusals: list[InfeasibleLayout] = []
    near: list[Estimate] = []
    tried = 0
    for layout in _layouts(estimator, limits, refusals):
        exact = estimator.resting_bytes(layout)
        tried += 1
        if exact > limits.memory_bytes:
            refusals.append(_too_large(layout, exact - limits.memory_bytes, "weights and optimizer"))
            continue
        rough = estimator.estimate(layout, closely=False)
        slack = _EAGER_EXCESS if estimator.workload.compiled else 1.0
        if rough.memory.total > slack * limits.memory_bytes:
            refusals.append(_not_fitting(rough, limits))
        else:
            near.append(rough)
    best: list[Estimate] = []
    for rough in sorted(near, key=_order):
        meshes = {_mesh(estimate.layout.parallel) for estimate in best}
        if len(best) == count or _mesh(rough.layout.parallel) in meshes:
            if rough.memory.total > limits.memory_bytes:
                refusals.append(_not_fitting(rough, limits))
            continue
        close = estimator.estimate(rough.layout, closely=True)
        if close.memory.total > limits.memory_bytes:
            refusals.append(_not_fitting(close, limits))
        else:
            best.append(close)
    return Plan(sorted(best, key=_order), refusals, tried)


def _order(estimate: Estimate) -> tuple[float, int, int]:
    """Faster first; of those that the estimate cannot tell apart, what splits less, then what holds less."""
    parallel = estimate.layout.parallel
    return float(f"{estimate.time.total:.2g}"), parallel.tp * parallel.cp * parallel.pp, estimate.memory.total


def _mesh(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.tp, parallel.cp, parallel.pp


def _not_fitting(estimate: Estimate, limits: Limits) -> InfeasibleLayout:
    memory = estimate.memory
    largest = max(zip(memory, memory._fields, strict=True))[1]
    return _too_large(estimate.layout, memory.total - limits.memory_bytes, largest)


def _too_large(layout: ParallelLayout, missing: int, largest: str) -> InfeasibleLayout:
    kind = f"memory, most of it {largest}"
    lacking = math.ceil(missing / 2**30 * 10) / 10  # a few bytes are told as 0.1, not as 0.0
    return InfeasibleLayout(layout.name(), f"lacks {lacking:.1f} GiB", kind, missing)


def _layouts(estimator: Estimator, limits: Limits, refusals: list[InfeasibleLayout]) -> Iterator[ParallelLayout]:
    """Every layout that the rules allow; what they forbid goes to `refusals`."""
    workload, model = estimator.workload, _ModelProblems(estimator)
    for pp in _divisors(limits.gpus):
        for tp in _divisors(limits.gpus // pp):
            for cp in _divisors(limits.gpus // (pp * tp)):
                name = f"tp {tp}, cp {cp}, pp {pp}"
                parallel = ParallelConfig(tp=tp, cp=cp, pp=pp, sequence_parallel=limits.sequence_parallel)
                if problem := _mesh_problem(workload.length, parallel) or model.of(parallel):
                    refusals.append(InfeasibleLayout(name, problem, problem))
                    continue
                dp = limits.gpus // (pp * tp * cp)
                if workload.global_batch_size % dp:
                    reason = f"{workload.global_batch_size} samples a step are not divisible by dp = {dp}"
                    refusals.append(InfeasibleLayout(name, reason, "samples a step are not divisible by dp"))
                    continue
                for variant in _streams(workload.length, parallel, limits, refusals):
                    yield from _variants(workload, variant, dp, refusals)


def _streams(
    length: int, parallel: ParallelConfig, limits: Limits, refusals: list[InfeasibleLayout]
) -> Iterator[ParallelConfig]:
    """The mesh, and of one with tp > 1 that with the stream split inside of tp, unless that alone is asked for."""
    if parallel.tp == 1 or not limits.sequence_parallel:
        yield parallel
    if parallel.tp > 1:
        split = parallel.model_copy(update={"sequence_parallel": True, "tp_overlap": limits.tp_overlap})
        if problem := split.length_problem(length):
            name = f"tp {parallel.tp}, cp {parallel.cp}, pp {parallel.pp}, sequence parallel"
            reason = f"a row of {length} tokens {problem}"
            refusals.append(InfeasibleLayout(name, reason, "rows do not divide over the ranks of sequence parallelism"))
        else:
            yield split


def _mesh_problem(length: int, parallel: ParallelConfig) -> str:
    """What keeps rows of `length` tokens, or this search, from a mesh; empty where nothing does."""
    if parallel.tp > GPUS_PER_HOST:
        return f"tp above {GPUS_PER_HOST} would reach over hosts, whose network is nine times slower"
    if parallel.cp > 1 and length < parallel.cp * LEAST_TOKENS:
        return f"cp would leave a rank less than {LEAST_TOKENS} of the {length} tokens of a row"
    problem = parallel.length_problem(length)
    return f"a row of {length} tokens {problem}" if problem else ""


class _ModelProblems:
    """What keeps the model from a mesh. What tp and cp ask of it does not depend on pp, nor the reverse."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, parallel: ParallelConfig) -> str:
        """The problem and its remedy; empty where there is none."""
        return self._split(parallel.tp, parallel.cp) or self._staged(parallel.pp)

    def _split(self, tp: int, cp: int) -> str:
        workload = self._estimator.workload
        if (tp, cp) not in self._known:
            self._known[tp, cp] = ""
            try:
                check_model(one_of_each(workload.model), ParallelConfig(tp=tp, cp=cp), workload.length)
            except ConfigError as error:
                self._known[tp, cp] = str(error)
        return self._known[tp, cp]

    def _staged(self, pp: int) -> str:
        if (pp,) not in self._known:
            self._known[pp,] = ""
            try:
                self._estimator.cut(pp, pp)
            except ConfigError as error:
                self._known[pp,] = str(error)
        return self._known[pp,]


def _variants(
    workload: Workload, parallel: ParallelConfig, dp: int, refusals: list[InfeasibleLayout]
) -> Iterator[ParallelLayout]:
    """The layouts of a mesh: ZeRO stages, micro-batches, recomputation."""
    samples = workload.global_batch_size // dp
    stages = [None] if dp * parallel.cp == 1 else [0, 1] if parallel.pp > 1 else [0, 1, 2, 3]
    for micro_batch_size in _divisors(samples):
        count = samples // micro_batch_size
        if problem := parallel.micro_batches_problem(count):
            name = f"tp {parallel.tp}, cp {parallel.cp}, pp {parallel.pp}, {count} micro-batches of {micro_batch_size}"
            refusals.append(InfeasibleLayout(name, problem, "the pipeline needs more micro-batches"))
            continue
        for zero in stages:
            staged = parallel.model_copy(update={"zero": zero})
            for recompute in (False, True):
                yield ParallelLayout(staged, dp, micro_batch_size, count, recompute)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
