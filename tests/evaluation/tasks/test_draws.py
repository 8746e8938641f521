"""ExampleDraws of the generated tasks: pinned values, ranges and laws."""

from itertools import permutations

import numpy as np
import pytest

from megalin.evaluation.tasks.draws import ExampleDraws


def test_draws_are_pinned():
    draws = ExampleDraws("test", 7, 3)
    assert draws.integers(1000, 6).tolist() == [684, 411, 290, 533, 785, 788]
    assert draws.distinct(100, 5).tolist() == [82, 40, 99, 57, 97]
    assert draws.weighted_distinct(np.arange(1.0, 9.0), 4).tolist() == [3, 5, 2, 6]
    assert [draws.integer(3, 9) for _ in range(5)] == [5, 8, 6, 9, 9]
    assert draws.order(6).tolist() == [4, 1, 0, 3, 2, 5]


def test_each_part_of_the_key_changes_the_draws():
    keys = [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0), ("a", -1, 0)]
    assert len({tuple(ExampleDraws(*key).integers(10**6, 4)) for key in keys}) == len(keys)


@pytest.mark.parametrize(("bound", "count"), [(1, 1), (10, 0), (10, 10), (10, 6), (4095, 64)])
def test_distinct_integers_are_distinct_and_in_range(bound, count):
    values = ExampleDraws("test", 0, 0).distinct(bound, count)
    assert len(set(values.tolist())) == len(values) == count
    assert all(0 <= value < bound for value in values)


def test_single_integers_reach_both_ends_equally_often():
    draws = ExampleDraws("test", 0, 0)
    counts = np.bincount([draws.integer(0, 3) for _ in range(8000)], minlength=4)
    assert abs(counts - 2000).max() < 5 * 2000**0.5


def test_weighted_draws_without_replacement_have_the_law_of_successive_draws():
    weights, tries = np.array([1.0, 2.0, 5.0]), 20_000
    draws = ExampleDraws("test", 0, 0)
    found = [tuple(draws.weighted_distinct(weights, 2).tolist()) for _ in range(tries)]
    for pair in permutations(range(3), 2):
        first, second = (weights[i] for i in pair)
        expected = first / weights.sum() * second / (weights.sum() - first)
        assert found.count(pair) / tries == pytest.approx(expected, abs=5 * (expected / tries) ** 0.5)
