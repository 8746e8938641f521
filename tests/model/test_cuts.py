"""Cutting a row of costs into runs: for one run a rank and for several, against every cut that there is."""

from __future__ import annotations

import itertools
import random

import pytest

from megalin.model.cuts import cut_by_rank

Quality = tuple[int, int, int]


def quality(costs: list[int], cut: list[range], num_ranks: int) -> Quality:
    """The largest sum of a rank, the largest run, the sum of squares."""
    runs = [sum(costs[run.start : run.stop]) for run in cut]
    return max(sum(runs[rank::num_ranks]) for rank in range(num_ranks)), max(runs), sum(cost**2 for cost in runs)


def best(costs: list[int], num_runs: int, num_ranks: int) -> Quality:
    """That of the best of all cuts."""
    inner = itertools.combinations(range(1, len(costs)), num_runs - 1)
    cuts = (itertools.pairwise([0, *borders, len(costs)]) for borders in inner)
    return min(quality(costs, [range(*ends) for ends in cut], num_ranks) for cut in cuts)


def row_of_costs(seed: int, size: int) -> list[int]:
    """Uneven ones, with a head at the end."""
    draw = random.Random(seed)
    return [draw.randint(1, 20) for _ in range(size - 1)] + [draw.randint(1, 60)]


def lengths(costs: list[int], num_runs: int) -> list[int]:
    return [len(run) for run in cut_by_rank(costs, num_runs, num_ranks=num_runs)]


def test_largest_run_is_as_small_as_it_can_be():
    assert lengths([1] * 8, 4) == [2, 2, 2, 2]
    assert lengths([1, 1, 1, 1, 1, 1, 1, 4], 3) in ([3, 4, 1], [4, 3, 1])  # a head that costs three layers
    assert lengths([9, 1, 1, 1], 2) == [1, 3]


def test_what_is_beyond_the_even_share_is_spread():
    assert sorted(lengths([1] * 10, 4)) == [2, 2, 3, 3]


def test_one_a_run():
    assert cut_by_rank([5, 1, 7], 3, num_ranks=3) == [range(0, 1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize(("num_ranks", "runs_a_rank"), [(2, 1), (3, 1), (5, 1), (2, 2), (2, 3), (3, 2)])
def test_cut_is_the_best_of_all(num_ranks: int, runs_a_rank: int):
    num_runs = num_ranks * runs_a_rank
    for seed in range(40):
        costs = row_of_costs(seed, num_runs + 1 + seed % 7)
        cut = cut_by_rank(costs, num_runs, num_ranks=num_ranks)
        assert [number for run in cut for number in run] == [*range(len(costs))]
        assert all(cut)
        assert quality(costs, cut, num_ranks) == best(costs, num_runs, num_ranks), costs


def test_what_is_below_the_largest_run_is_even_too():
    """A beginning may have larger runs than another one, below the largest of all, and be the more even one."""
    assert lengths([15, 8, 4, 3, 16, 9, 27], 4) == [1, 3, 2, 1]
    costs = [3, 4, 1, 4, 3, 4, 4, 6, 2]
    cut = cut_by_rank(costs, 6, num_ranks=2)
    assert quality(costs, cut, 2) == best(costs, 6, 2) == (16, 8, 185)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_search_that_forgets_is_never_worse_than_the_even_cut(num_ranks: int):
    for seed in range(3):
        costs = row_of_costs(seed, 100)
        even = cut_by_rank(costs, 32, num_ranks=32)
        cut = cut_by_rank(costs, 32, num_ranks=num_ranks)
        assert quality(costs, cut, num_ranks) <= quality(costs, even, num_ranks)
