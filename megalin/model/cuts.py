"""A row of costs cut into runs of neighbours, evenly: for the stages of a pipeline, one or several a rank."""

from __future__ import annotations

import itertools
from typing import NamedTuple

_KEPT = 8192
"""Beginnings that the search for several runs a rank goes on with, of all numbers of runs together."""


class _Cut(NamedTuple):
    """A cut, or the first runs of one."""

    largest: int
    """The largest run."""
    squares: int
    """The sum of the squares of the runs."""
    borders: list[int]
    """Where the runs start, and where the last one ends."""

    def longer(self, cost: int, end: int) -> _Cut:
        """With one run more, to `end`."""
        return _Cut(max(self.largest, cost), self.squares + cost**2, [*self.borders, end])

    def ranges(self) -> list[range]:
        """The runs."""
        return [range(start, end) for start, end in itertools.pairwise(self.borders)]


def cut_by_rank(costs: list[int], num_runs: int, *, num_ranks: int) -> list[range]:
    """The cut, run s on rank s % num_ranks, whose largest sum of a rank is least; of those the one with the least
    largest run, of those with the least sum of squares. Costs are positive.

    Exact with one run a rank. With several it is a search, never worse than the even cut and exact while it keeps every
    beginning: by one run more at a time, it keeps those whose ranks are most even with the rest shared out evenly.
    """
    before = [0, *itertools.accumulate(costs)]
    even = _even_cut(before, num_runs)
    if num_runs == num_ranks:
        return even.ranges()
    sums = [before[run.stop] - before[run.start] for run in even.ranges()]
    best = max(sum(sums[rank::num_ranks]) for rank in range(num_ranks)), even
    for _ in range(2):  # the second time it knows the largest run, and any smaller one is as good
        best = min([best, *_search(before, num_runs, num_ranks, bound=best[0], largest=best[1].largest)])
    return best[1].ranges()


def _search(before: list[int], num_runs: int, num_ranks: int, *, bound: int, largest: int) -> list[tuple[int, _Cut]]:
    """The cuts that it comes to with no rank above `bound`, each after its largest sum of a rank."""
    kept = {(0,) * num_ranks: _Cut(largest, 0, [0])}  # by the sum of each rank
    for run in range(num_runs):
        rank, found = run % num_ranks, dict[tuple[int, ...], _Cut]()
        ends = [each for ranks, cut in kept.items() for each in _ends(ranks, cut, before, run, num_runs, bound)]
        for _, ranks, end in sorted(ends):
            cost = before[end] - sum(ranks)
            key, cut = (*ranks[:rank], ranks[rank] + cost, *ranks[rank + 1 :]), kept[ranks].longer(cost, end)
            found[key] = min(cut, found.get(key, cut))
            if len(found) == _KEPT // num_runs:
                break
        kept = found
    return [(max(ranks), cut) for ranks, cut in kept.items()]


def _ends(
    ranks: tuple[int, ...], cut: _Cut, before: list[int], run: int, num_runs: int, bound: int
) -> list[tuple[int, tuple[int, ...], int]]:
    """Where the next run of a beginning may end: its rank has at most `bound`, and each later run something. Each after
    how uneven the ranks then are, by the sum of the squares of their sums, times the squared number of runs left."""
    start, size, rank = cut.borders[-1], len(ranks), run % len(ranks)
    # After the next run `left` are left: `rounds` of each rank, one less of those up to this one.
    left, rounds = num_runs - run - 1, num_runs // size - run // size
    squares, done = sum(cost**2 for cost in ranks) - ranks[rank] ** 2, sum(ranks[:rank])
    runs_left = (rank + 1) * (rounds - 1) ** 2 + (size - rank - 1) * rounds**2
    found = []
    for end in range(start + 1 if left else len(before) - 1, len(before) - left):
        own = ranks[rank] + before[end] - before[start]
        if own > bound:
            break
        rest = before[-1] - before[end]
        # (left * cost + runs of the rank * rest) ** 2 of each rank, added up.
        uneven = left**2 * (squares + own**2) + runs_left * rest**2
        uneven += 2 * left * rest * (rounds * before[end] - done - own)
        found.append((uneven, ranks, end))
    return found


def _even_cut(before: list[int], num_runs: int) -> _Cut:
    """The cut with the least largest run, of those with the least sum of squares: by the end of what is cut so far, for
    one run more at a time. Twice: the second time it knows the largest run, and any smaller one is as good."""
    largest, size = 0, len(before) - 1
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
    return best[size]
