"""Partitions layers into contiguous pipeline stages, balancing cost or simulated schedule time."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PLANNED_ROUNDS = 8
"""Micro-batches a rank in the simulated schedule. With more, the ramp-up and ramp-down of a step weigh less, and the
balance between ranks weighs more."""

_TRIES = 30
"""Restarts of the search."""
_STEPS = 20_000_000
"""Limit of simulated operations in a search, after which no further moves are compared: about a second."""
_AT_ONCE = 256
"""Partitions that are simulated together."""


class _Cut(NamedTuple):
    """A partition into runs, one a stage, or the first runs of one."""

    largest: int
    """Cost of the most expensive run."""
    squares: int
    """Sum of the squares of the runs' costs."""
    boundaries: list[int]
    """The starts of the runs, and the end of the last one."""

    def longer(self, cost: int, end: int) -> _Cut:
        """This partition with one more run, up to `end`."""
        return _Cut(max(self.largest, cost), self.squares + cost**2, [*self.boundaries, end])


def cut_evenly(costs: list[int], num_runs: int) -> list[range]:
    """Balances positive costs: minimizes the most expensive run, then the sum of squares.

    Dynamic programming over the end of the last run, one run at a time. The second pass starts from the cost of the
    most expensive run, so it treats cheaper maxima as equal.
    """
    before = [0, *itertools.accumulate(costs)]
    largest, size = 0, len(costs)
    for _ in range(2):
        best = {0: _Cut(largest, 0, [0])}
        for run in range(num_runs):
            shorter, best = best, {}
            for end in range(run + 1, size - (num_runs - run - 1) + 1):
                for start in range(end - 1, run - 1, -1):
                    cost = before[end] - before[start]
                    if end in best and cost > best[end].largest:
                        break
                    if start in shorter:
                        cut = shorter[start].longer(cost, end)
                        best[end] = min(cut, best.get(end, cut))
        largest = best[size].largest
    return _ranges(best[size].boundaries)


def cut_for_interleaving(costs: list[int], num_runs: int, *, num_ranks: int) -> list[range]:
    """Minimizes the simulated time of interleaved 1F1B, run s on rank s % num_ranks, a backward twice a forward.

    Equal sums over the ranks are not enough: ranks alternate between their runs and wait for slower neighbours. A
    local search, never worse than `cut_evenly`: it shifts boundaries between runs while that helps, and restarts from
    partitions near the best one.
    """
    schedule = _Schedule(num_ranks, num_runs // num_ranks, _PLANNED_ROUNDS * num_ranks)
    moves = _moves(num_runs, most=_STEPS // 4 // len(schedule.operations))
    search = _Search(np.array([0, *itertools.accumulate(costs)], dtype=np.float64), schedule, np.array(moves))
    even = np.array([0, *(run.stop for run in cut_evenly(costs, num_runs))])
    return _ranges(search.best(even).tolist())


def _moves(num_runs: int, *, most: int) -> list[list[int]]:
    """Changes of a partition's boundaries that are compared with each other: neighbouring ones by one layer, as many
    neighbours at once as `most` changes allow, but at least single ones."""
    inner = range(1, num_runs)
    together = max(itertools.takewhile(lambda count: count * (2 * num_runs - 1 - count) <= most, inner), default=1)
    return [
        [sign * (first <= boundary <= last) for boundary in range(num_runs + 1)]
        for first, last in itertools.combinations_with_replacement(inner, 2)
        if last - first < together
        for sign in (1, -1)
    ]


class _Schedule:
    """The operations of one interleaved 1F1B step, in an order that respects their dependencies."""

    def __init__(self, num_ranks: int, runs_a_rank: int, num_micro_batches: int) -> None:
        self.num_runs = num_ranks * runs_a_rank
        rows = [interleaved_order(rank, num_ranks, runs_a_rank, num_micro_batches) for rank in range(num_ranks)]
        self.operations: list[tuple[int, int, int]] = []
        """(run, plus num_runs for a backward; the previous operation on the same rank; the operation on another rank
        whose result it takes). -1: none."""
        number: dict[Operation, int] = {}
        done, last = [0] * num_ranks, [-1] * num_ranks
        while len(number) < sum(map(len, rows)):
            for rank, row in enumerate(rows):
                for operation in row[done[rank] :]:
                    awaited = operation.awaited(self.num_runs)
                    if awaited is not None and awaited not in number:
                        break
                    run = operation.stage + self.num_runs * operation.backward
                    self.operations.append((run, last[rank], -1 if awaited is None else number[awaited]))
                    last[rank] = number[operation] = len(number)
                    done[rank] += 1

    def seconds(self, costs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Duration of the step, by the forward's cost of each run: [partitions, runs] -> [partitions]."""
        lasting = np.concatenate([costs, 2 * costs], axis=1).T.copy()
        ends = np.zeros((len(self.operations) + 1, len(costs)))
        for number, (run, before, awaited) in enumerate(self.operations):
            np.maximum(ends[before], ends[awaited], out=ends[number])
            ends[number] += lasting[run]
        latest: NDArray[np.float64] = ends.max(axis=0)
        return latest


class Operation(NamedTuple):
    """The forward or the backward of a micro-batch on a stage."""

    backward: bool
    stage: int
    micro_batch: int

    def awaited(self, num_stages: int) -> Operation | None:
        """The operation whose result it takes, None for the first forward."""
        if self.backward:
            last = self.stage == num_stages - 1
            return Operation(not last, self.stage + (not last), self.micro_batch)
        return Operation(False, self.stage - 1, self.micro_batch) if self.stage > 0 else None


def interleaved_order(rank: int, num_ranks: int, stages_a_rank: int, num_micro_batches: int) -> list[Operation]:
    """A rank's operations in interleaved 1F1B, in order; num_micro_batches is a multiple of num_ranks.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters, section 2.2.2.
    """
    own = range(rank, num_ranks * stages_a_rank, num_ranks)
    rounds = [range(first, first + num_ranks) for first in range(0, num_micro_batches, num_ranks)]
    forwards = [Operation(False, stage, number) for numbers in rounds for stage in own for number in numbers]
    backwards = [Operation(True, stage, number) for numbers in rounds for stage in reversed(own) for number in numbers]
    ahead = min((stages_a_rank - 1) * num_ranks + 2 * (num_ranks - 1 - rank), len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *itertools.chain(*pairs), *backwards[len(forwards) - ahead :]]


class _Search:
    """Local search for the partition of the shortest schedule.

    Args:
        before: cumulative costs, [layers + 1].
        moves: [moves, boundaries] changes of a partition's boundaries.
    """

    def __init__(self, before: NDArray[np.float64], schedule: _Schedule, moves: NDArray[np.int64]) -> None:
        self._before, self._schedule, self._moves = before, schedule, moves
        self._steps = 0

    def best(self, start: NDArray[np.int64]) -> NDArray[np.int64]:
        """The best partition found."""
        draw = random.Random(0)
        seconds, cut = self._descend(start)
        for _ in range(_TRIES):
            if self._steps >= _STEPS:
                break
            other = cut
            for _ in range(3):
                moved = other + self._moves[draw.randrange(len(self._moves))]
                other = moved if self._whole(moved[None])[0] else other
            found = self._descend(other)
            if found[0] < seconds:
                seconds, cut = found
        return cut

    def _descend(self, cut: NDArray[np.int64]) -> tuple[float, NDArray[np.int64]]:
        """Steepest descent to a local minimum: its time and its partition."""
        seconds, better = self._seconds(cut[None])[0], True
        while better and self._steps < _STEPS:
            cuts = np.concatenate([cut[None], cut + self._moves])
            cuts = cuts[self._whole(cuts)]
            each = self._seconds(cuts)
            better = each.min() < seconds
            seconds, cut = each.min(), cuts[each.argmin()]
        return seconds, cut

    def _whole(self, cuts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True where no run is empty: [partitions, boundaries] -> [partitions]."""
        whole: NDArray[np.bool_] = np.all(np.diff(cuts, axis=1) > 0, axis=1)
        return whole

    def _seconds(self, cuts: NDArray[np.int64]) -> NDArray[np.float64]:
        self._steps += len(cuts) * len(self._schedule.operations)
        parts = np.array_split(cuts, -(-len(cuts) // _AT_ONCE))
        return np.concatenate([self._schedule.seconds(np.diff(self._before[part], axis=1)) for part in parts])


def _ranges(boundaries: list[int]) -> list[range]:
    return [range(start, end) for start, end in itertools.pairwise(boundaries)]
