"""Search over parallel layouts: rejects infeasible ones with a reason and ranks the rest by predicted step time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.parallel.config import ParallelConfig, TPOverlapName
from megalin.planner.estimate import Estimate, Estimator
from megalin.planner.hardware import GPUS_PER_HOST
from megalin.planner.workload import ParallelLayout, Workload, one_of_each
from megalin.train.float8 import check_float8_layers
from megalin.train.launch_checks import check_model

MIN_TOKENS_PER_RANK = 1024
"""Least tokens of a sequence per rank under context parallelism; with fewer, communication dominates."""
RESERVED_FRACTION = 0.08
"""Fraction of a GPU's memory left to CUDA's context, NCCL's buffers and the allocator's gaps; chosen, not measured."""
SIMPLER_WITHIN = 0.02
"""Fraction of the step time that a simpler layout may take longer and still be preferred: below what the estimate can
tell apart."""
EAGER_EXCESS = 1.25
"""Ratio of eager estimate to memory up to which a layout of a compiled workload still gets a refined estimate."""


class InfeasibleLayout(NamedTuple):
    """A layout, or all layouts of a mesh, that cannot run."""

    layout: str
    reason: str
    kind: str
    """Reason without the layout's numbers, to group by."""
    missing_bytes: int = 0
    """Bytes above the memory limit."""


class Plan(NamedTuple):
    """Result of a search."""

    best: list[Estimate]
    """The fastest layout of each mesh, or a simpler one that is hardly slower, in the order of `by_preference`."""
    refusals: list[InfeasibleLayout]
    num_layouts: int
    """Number of layouts estimated or rejected for their memory."""


class Limits(NamedTuple):
    """Constraints of a search."""

    gpus: int
    memory_bytes: int
    """Memory of a GPU for tensors (`usable_bytes`)."""
    sequence_parallel: bool = False
    """True to search layouts with tp > 1 only with sequence parallelism; False for both."""
    tp_overlap: TPOverlapName = "auto"
    """parallel.tp_overlap of layouts with sequence parallelism."""


def usable_bytes(memory_bytes: int) -> int:
    """Part of a GPU's memory available to tensors: all but RESERVED_FRACTION."""
    return int(memory_bytes * (1 - RESERVED_FRACTION))


def search(estimator: Estimator, limits: Limits, *, count: int) -> Plan:
    """Finds the fastest layouts that fit, one per mesh (tp, cp, pp), at most `count`, in the order of `by_preference`.

    A first pass estimates all layouts from eager traces of one and two samples, which is quick. A second refines those
    that may fit, in that order, so that every returned layout fits by a refined estimate.
    """
    refusals: list[InfeasibleLayout] = []
    near: list[Estimate] = []
    tried = 0
    for layout in _layouts(estimator, limits, refusals):
        exact = estimator.model_state_bytes(layout)
        tried += 1
        if exact > limits.memory_bytes:
            refusals.append(_too_large(layout, exact - limits.memory_bytes, "weights and optimizer"))
            continue
        rough = estimator.estimate(layout, refined=False)
        slack = EAGER_EXCESS if estimator.workload.compiled else 1.0
        if rough.memory.total > slack * limits.memory_bytes:
            refusals.append(not_fitting(rough, limits))
        else:
            near.append(rough)
    best: list[Estimate] = []
    left = sorted(near, key=_step_seconds)
    while left and len(best) < count:
        rough = _preferred(left)
        close = estimator.estimate(rough.layout, refined=True)
        if close.memory.total > limits.memory_bytes:
            refusals.append(not_fitting(close, limits))
            left.remove(rough)
        else:
            best.append(close)
            passed = [each for each in left if _mesh(each) == _mesh(rough) and each is not rough]
            refusals += _refused_by_estimate(passed, limits)
            left = [each for each in left if _mesh(each) != _mesh(rough)]
    refusals += _refused_by_estimate(left, limits)
    return Plan(by_preference(best), refusals, tried)


def by_preference(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The estimates, fastest first; of those within SIMPLER_WITHIN of the fastest one left, the simplest comes next."""
    left, ordered = sorted(estimates, key=_step_seconds), []
    while left:
        ordered.append(_preferred(left))
        left.remove(ordered[-1])
    return ordered


def _preferred(fastest_first: Sequence[Estimate]) -> Estimate:
    """The simplest of those within SIMPLER_WITHIN of the first: with the fewest axes besides the data axis, the fewest
    ranks a replica, no recomputation, the lowest ZeRO stage; then the fastest, then that with the least memory."""

    def key(estimate: Estimate) -> tuple[float, ...]:
        layout, axes = estimate.layout, _mesh(estimate)
        features = (sum(size > 1 for size in axes), math.prod(axes), layout.recompute, layout.zero)
        return *features, estimate.time.total, estimate.memory.total

    limit = fastest_first[0].time.total * (1 + SIMPLER_WITHIN)
    return min(itertools.takewhile(lambda estimate: estimate.time.total <= limit, fastest_first), key=key)


def _step_seconds(estimate: Estimate) -> float:
    return estimate.time.total


def _refused_by_estimate(estimates: Iterable[Estimate], limits: Limits) -> Iterator[InfeasibleLayout]:
    """The refusals of those whose rough estimate does not fit."""
    return (not_fitting(each, limits) for each in estimates if each.memory.total > limits.memory_bytes)


def _mesh(estimate: Estimate) -> tuple[int, int, int]:
    parallel = estimate.layout.parallel
    return parallel.tp, parallel.cp, parallel.pp


def not_fitting(estimate: Estimate, limits: Limits) -> InfeasibleLayout:
    """The refusal of a layout that needs too much memory."""
    memory = estimate.memory
    largest = max(zip(memory, memory._fields, strict=True))[1]
    return _too_large(estimate.layout, memory.total - limits.memory_bytes, largest)


def _too_large(layout: ParallelLayout, missing: int, largest: str) -> InfeasibleLayout:
    kind = f"memory, most of it {largest}"
    lacking = math.ceil(missing / 2**30 * 10) / 10  # rounded up: a few bytes print as 0.1, not as 0.0
    return InfeasibleLayout(layout.name(), f"lacks {lacking:.1f} GiB", kind, missing)


def _layouts(estimator: Estimator, limits: Limits, refusals: list[InfeasibleLayout]) -> Iterator[ParallelLayout]:
    """Yields every valid layout; invalid ones go to `refusals`."""
    model = ModelProblems(estimator)
    for parallel in meshes(limits):
        yield from mesh_layouts(model, parallel, limits, refusals)


def meshes(limits: Limits) -> Iterator[ParallelConfig]:
    """Yields every division of the GPUs over the axes, valid or not."""
    for pp in _divisors(limits.gpus):
        for tp in _divisors(limits.gpus // pp):
            for cp in _divisors(limits.gpus // (pp * tp)):
                yield ParallelConfig(tp=tp, cp=cp, pp=pp, sequence_parallel=limits.sequence_parallel)


def mesh_layouts(
    model: ModelProblems, parallel: ParallelConfig, limits: Limits, refusals: list[InfeasibleLayout]
) -> Iterator[ParallelLayout]:
    """Yields every valid layout of one of `meshes`; invalid ones go to `refusals`."""
    workload = model.estimator.workload
    name = f"tp {parallel.tp}, cp {parallel.cp}, pp {parallel.pp}"
    if problem := _mesh_problem(workload.length, parallel) or model.of(parallel):
        refusals.append(InfeasibleLayout(name, problem, problem))
        return
    dp = limits.gpus // (parallel.pp * parallel.tp * parallel.cp)
    if workload.global_batch_size % dp:
        reason = f"{workload.global_batch_size} samples a step are not divisible by dp = {dp}"
        refusals.append(InfeasibleLayout(name, reason, "samples a step are not divisible by dp"))
        return
    for variant in _tp_variants(workload.length, parallel, limits, refusals):
        yield from _variants(workload, variant, dp, refusals)


def _tp_variants(
    length: int, parallel: ParallelConfig, limits: Limits, refusals: list[InfeasibleLayout]
) -> Iterator[ParallelConfig]:
    """Yields the mesh without and, for tp > 1, with sequence parallelism; only the latter if `limits` requires it."""
    if parallel.tp == 1 or not limits.sequence_parallel:
        yield parallel
    if parallel.tp > 1:
        variant = parallel.model_copy(update={"sequence_parallel": True, "tp_overlap": limits.tp_overlap})
        if problem := variant.length_problem(length):
            name = f"tp {parallel.tp}, cp {parallel.cp}, pp {parallel.pp}, sequence parallel"
            reason = f"a sequence of {length} tokens {problem}"
            kind = "the sequence length is not divisible as sequence parallelism needs"
            refusals.append(InfeasibleLayout(name, reason, kind))
        else:
            yield variant


def _mesh_problem(length: int, parallel: ParallelConfig) -> str:
    """Reason why sequences of `length` tokens, or this search, cannot use a mesh; empty if they can."""
    if parallel.tp > GPUS_PER_HOST:
        return f"tp above {GPUS_PER_HOST} would span hosts, whose network is nine times slower"
    if parallel.cp > 1 and length < parallel.cp * MIN_TOKENS_PER_RANK:
        return f"cp would leave a rank fewer than {MIN_TOKENS_PER_RANK} of the {length} tokens of a sequence"
    problem = parallel.length_problem(length)
    return f"a sequence of {length} tokens {problem}" if problem else ""


class ModelProblems:
    """Cached reasons why the model cannot use a mesh; those of tp and cp do not depend on pp, and vice versa."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, parallel: ParallelConfig) -> str:
        """Reason and remedy; empty if the mesh suits the model."""
        return self._tp_cp_problem(parallel.tp, parallel.cp) or self._pp_problem(parallel.pp)

    def _tp_cp_problem(self, tp: int, cp: int) -> str:
        workload = self.estimator.workload
        if (tp, cp) not in self._known:
            self._known[tp, cp] = ""
            try:
                model, parallel = one_of_each(workload.model), ParallelConfig(tp=tp, cp=cp)
                check_model(model, parallel, workload.length)
                check_float8_layers(model, parallel, workload.float8)
            except ConfigError as error:
                self._known[tp, cp] = str(error)
        return self._known[tp, cp]

    def _pp_problem(self, pp: int) -> str:
        if (pp,) not in self._known:
            self._known[pp,] = ""
            try:
                self.estimator.partition(pp, pp)
            except ConfigError as error:
                self._known[pp,] = str(error)
        return self._known[pp,]


def _variants(
    workload: Workload, parallel: ParallelConfig, dp: int, refusals: list[InfeasibleLayout]
) -> Iterator[ParallelLayout]:
    """Yields the layouts of a mesh: ZeRO stages, micro-batch sizes, recomputation."""
    samples = workload.global_batch_size // dp
    stages = [None] if dp * parallel.cp == 1 else [0, 1] if parallel.pp > 1 else [0, 1, 2, 3]
    for micro_batch_size in _divisors(samples):
        count = samples // micro_batch_size
        if problem := parallel.micro_batches_problem(count):
            name = f"tp {parallel.tp}, cp {parallel.cp}, pp {parallel.pp}, {count} micro-batches of {micro_batch_size}"
            refusals.append(InfeasibleLayout(name, problem, "the pipeline needs more micro-batches"))
            continue
        for zero in stages:
            with_zero = parallel.model_copy(update={"zero": zero})
            for recompute in (False, True):
                yield ParallelLayout(with_zero, dp, micro_batch_size, count, recompute)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
