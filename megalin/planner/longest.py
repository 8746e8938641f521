"""Search for the longest sequences that fit the GPUs, on each mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from megalin.parallel.config import ParallelConfig
from megalin.planner.estimate import Estimate, Estimator
from megalin.planner.hardware import Hardware
from megalin.planner.search import (
    EAGER_EXCESS,
    MIN_TOKENS_PER_RANK,
    InfeasibleLayout,
    Limits,
    ModelProblems,
    mesh_layouts,
    meshes,
    not_fitting,
)
from megalin.planner.workload import Workload

LENGTH_MULTIPLE = 1024
"""Lengths are multiples of this number of tokens, and of tp times cp."""
_SECOND = 8
"""Ratio of the two lengths whose rough estimates give the first guess."""
_SECANT_STEPS = 8
"""Number of steps after which the search halves its interval instead."""


class LongestSequence(NamedTuple):
    """The longest sequence of a mesh, and the layout that it fits."""

    length: int
    """Tokens."""
    estimate: Estimate
    """Of the layout with the least memory, with one sample a micro-batch."""


class LongestPlan(NamedTuple):
    """Result of a search."""

    best: list[LongestSequence]
    """One of each mesh, longest first."""
    refusals: list[InfeasibleLayout]
    """Meshes on which no length fits."""
    num_meshes: int


def longest_sequences(
    workload: Workload,
    hardware: Hardware,
    limits: Limits,
    *,
    count: int,
    on_estimate: Callable[[], None] = lambda: None,
) -> LongestPlan:
    """Finds the longest sequences of the `count` meshes that allow the longest ones.

    Each length fits by a refined estimate, as `search` at that length would find, and the next multiple does not.
    Meshes are ranked by rough estimates at two lengths first; memory grows almost linearly with the length.

    Args:
        workload: its length has no effect.
        on_estimate: called after each estimate, for a display of progress.
    """
    estimators = _Estimators(workload, hardware, on_estimate)
    refusals: list[InfeasibleLayout] = []
    guesses: list[tuple[int, _MeshLengths, float]] = []
    tried = 0
    for parallel in meshes(limits):
        tried += 1
        lengths = _MeshLengths(estimators, parallel, limits)
        if (slope := lengths.rough_slope(refusals)) is not None:
            guesses.append((lengths.guess * lengths.step, lengths, slope))
    best: list[LongestSequence] = []
    for _, lengths, slope in sorted(guesses, key=lambda guess: -guess[0]):
        if len(best) == count:
            break
        if (found := lengths.longest(slope, refusals)) is not None:
            best.append(found)
    return LongestPlan(sorted(best, key=lambda found: -found.length), refusals, tried)


class _Estimators:
    """The estimator of each length, which meshes share."""

    def __init__(self, workload: Workload, hardware: Hardware, on_estimate: Callable[[], None]) -> None:
        self.workload, self._hardware, self._on_estimate = workload, hardware, on_estimate
        self._known: dict[int, ModelProblems] = {}

    def at(self, length: int) -> ModelProblems:
        if length not in self._known:
            workload = self.workload._replace(length=length)
            self._known[length] = ModelProblems(Estimator(workload, self._hardware, on_estimate=self._on_estimate))
        return self._known[length]


class _MeshLengths:
    """Lengths of one mesh, counted in steps.

    Attributes:
        step: tokens of a step: the least multiple of LENGTH_MULTIPLE that all its ranks can share.
        first: the shortest length, that of MIN_TOKENS_PER_RANK tokens a rank and of the widest window.
        guess: the longest length by the rough estimates, set by `rough_slope`.
    """

    def __init__(self, estimators: _Estimators, parallel: ParallelConfig, limits: Limits) -> None:
        self._estimators, self._parallel, self._limits = estimators, parallel, limits
        self.step = math.lcm(LENGTH_MULTIPLE, parallel.tp * parallel.cp)
        blocks = estimators.workload.model.blocks()
        windows = [sublayer.widest_window or 0 for _, block in blocks for sublayer in block.sublayers]
        self.first = math.ceil(max(parallel.cp * MIN_TOKENS_PER_RANK, *windows, 1) / self.step)
        self.guess = self.first

    def rough_slope(self, refusals: list[InfeasibleLayout]) -> float | None:
        """Memory in bytes that a step of the length adds, by rough estimates, which also give `guess`; None, with
        refusals, if the mesh is invalid or no length fits."""
        limit = self._limits.memory_bytes
        invalid: list[InfeasibleLayout] = []
        shortest = self._least(self.first, invalid, refined=False)
        if shortest is None:
            refusals += invalid
            return None
        slack = EAGER_EXCESS if self._estimators.workload.compiled else 1.0
        if shortest.memory.total > slack * limit:
            refusals.append(not_fitting(shortest, self._limits))
            return None
        number, grown = self.first, 0
        while grown <= 0:  # at short lengths another moment of the step may have the peak
            number *= _SECOND
            longer = self._least(number, [], refined=False)
            assert longer is not None, (self._parallel, number * self.step)
            grown = longer.memory.total - shortest.memory.total
        slope = grown / (number - self.first)
        self.guess = max(self.first, self.first + int((limit - shortest.memory.total) / slope))
        return slope

    def longest(self, slope: float, refusals: list[InfeasibleLayout]) -> LongestSequence | None:
        """The longest length that fits by refined estimates, while one step more does not; None, with a refusal, if
        none does. The search starts at `guess` with `slope`."""
        estimates: dict[int, Estimate] = {}

        def memory(number: int) -> int:
            estimate = self._least(number, [], refined=True)
            assert estimate is not None, (self._parallel, number * self.step)
            estimates[number] = estimate
            return estimate.memory.total

        limit = self._limits.memory_bytes
        number = last_fitting(memory, limit, first=self.first, guess=self.guess, slope=slope)
        if number < self.first:
            refusals.append(not_fitting(estimates[self.first], self._limits))
            return None
        return LongestSequence(number * self.step, estimates[number])

    def _least(self, number: int, refusals: list[InfeasibleLayout], *, refined: bool) -> Estimate | None:
        """The layout with the least memory at `number` steps, with one sample a micro-batch; None if there is no valid
        one. Invalid layouts go to `refusals`."""
        model = self._estimators.at(number * self.step)
        estimates = [
            model.estimator.estimate(layout, refined=False)
            for layout in mesh_layouts(model, self._parallel, self._limits, refusals)
            if layout.micro_batch_size == 1
        ]
        if refined and self._estimators.workload.compiled:
            largest = EAGER_EXCESS * min(estimate.memory.total for estimate in estimates)
            near = [estimate.layout for estimate in estimates if estimate.memory.total <= largest]
            estimates = [model.estimator.estimate(layout, refined=True) for layout in near]
        return min(estimates, key=lambda estimate: (estimate.memory.total, estimate.time.total), default=None)


def last_fitting(memory: Callable[[int], int], limit: int, *, first: int, guess: int, slope: float) -> int:
    """The largest number from `first` on whose memory is within `limit`, or first - 1 if there is none; `memory` does
    not decrease.

    Follows the secant of the last two values, from `guess` and `slope`, inside the interval between a number that fits
    and one that does not. Both ends of the last interval have been evaluated.
    """
    fits, too_long = first - 1, math.inf
    last: tuple[int, int] | None = None
    number, steps = guess, 0
    while too_long - fits > 1:
        value = memory(number)
        fits, too_long = (number, too_long) if value <= limit else (fits, number)
        if last is not None and (value - last[1]) * (number - last[0]) > 0:
            slope = (value - last[1]) / (number - last[0])
        last = number, value
        steps += 1
        number += math.floor((limit - value) / slope)
        if steps > _SECANT_STEPS:
            number = 2 * fits if too_long == math.inf else (fits + int(too_long)) // 2
        number = int(min(max(number, fits + 1), too_long - 1))
    return fits
