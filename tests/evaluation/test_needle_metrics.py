"""Needle metrics against hand-made arrays and a version of the paper's rules in exact arithmetic."""

from fractions import Fraction
from itertools import groupby, product
from math import isclose, sqrt

import numpy as np
import pytest

from megalin.errors import MegalinError
from megalin.evaluation.needle import (
    accuracy_at_length,
    accuracy_up_to_length,
    mean_accuracy,
    niah_score,
    weighted_average,
)

RATIO = Fraction(6, 5)


def expected_scores(rows, depth_ratio=RATIO, length_ratio=RATIO):
    """(weighted average, NIAH score), cell by cell."""
    weights = [[depth_ratio**i * length_ratio**j for j in range(len(rows[0]))] for i in range(len(rows))]
    total = sum(map(sum, weights))
    average, score = Fraction(0), 0.0
    for j, column in enumerate(zip(*rows, strict=True)):
        runs = [key for key, _ in groupby(column)]
        penalty = 0.0 if 1 not in runs else 1.0 if 0 not in runs else sqrt(0.5) ** (len(runs) - 1)
        gain = sum(weights[i][j] for i, cell in enumerate(column) if cell) / total
        average += gain
        score += float(gain) * penalty
    return float(average), score


def test_column_by_column_penalties_of_a_hand_made_array():
    success = np.array(
        [  # all, none, one change, alternating, one gap
            [1, 0, 0, 1, 1],
            [1, 0, 0, 0, 0],
            [1, 0, 1, 1, 1],
            [1, 0, 1, 0, 1],
        ],
        bool,
    )
    equal = niah_score(success, depth_ratio=1, length_ratio=1)
    # 20 cells: 4 of p = 1, none, 2 of 2^(-1/2), 2 of 2^(-3/2), 3 of 2^-1
    assert isclose(equal, (4 + 2 * 2**-0.5 + 2 * 2**-1.5 + 3 * 0.5) / 20, rel_tol=1e-14)
    assert isclose(weighted_average(success, 1, 1), 11 / 20, rel_tol=1e-14)


def test_weights_by_hand():
    deep_long = np.array([[0, 0], [0, 1]], bool)
    # weights 1, 2 for depth and 1, 3 for length: 6 of 12
    assert isclose(weighted_average(deep_long, depth_ratio=2, length_ratio=3), 0.5, rel_tol=1e-14)
    assert isclose(weighted_average(deep_long[::-1], 2, 3), 0.25, rel_tol=1e-14)
    assert isclose(niah_score(deep_long, 2, 3), 0.5 * 2**-0.5, rel_tol=1e-14)


@pytest.mark.parametrize(("depths", "lengths"), [(1, 1), (1, 3), (3, 1), (3, 3), (4, 2)])
def test_every_small_array_agrees_with_exact_arithmetic(depths, lengths):
    for bits in product((0, 1), repeat=depths * lengths):
        success = np.array(bits, bool).reshape(depths, lengths)
        found = weighted_average(success), niah_score(success)
        assert found == pytest.approx(expected_scores(success.astype(int).tolist()), rel=1e-12, abs=1e-15)


def test_all_and_nothing():
    for shape in ((1, 1), (10, 7)):
        assert weighted_average(np.ones(shape, bool)) == pytest.approx(1, rel=1e-14)
        assert niah_score(np.ones(shape, bool)) == pytest.approx(1, rel=1e-14)
        assert weighted_average(np.zeros(shape, bool)) == niah_score(np.zeros(shape, bool)) == 0


def test_many_depths_with_a_steep_ratio_stay_finite():
    success = np.zeros((2000, 1), bool)
    success[-1] = True
    assert weighted_average(success, depth_ratio=10) == pytest.approx(0.9, rel=1e-12)


def test_accuracies_by_length():
    success = [[True, False, True], [True, True, False], [True, False, False]]
    assert accuracy_at_length(success).tolist() == pytest.approx([1, 1 / 3, 1 / 3])
    assert accuracy_up_to_length(success).tolist() == pytest.approx([1, 4 / 6, 5 / 9])
    assert mean_accuracy(success) == pytest.approx(5 / 9)


@pytest.mark.parametrize("function", [accuracy_at_length, accuracy_up_to_length, mean_accuracy, niah_score])
def test_arrays_of_another_form_are_refused(function):
    with pytest.raises(MegalinError, match=r"shape \[3\]; it must be \[depths, lengths\]"):
        function(np.ones(3, bool))
    with pytest.raises(MegalinError, match=r"shape \[0, 4\]"):
        function(np.ones((0, 4), bool))
    with pytest.raises(MegalinError, match="compare the scores with a threshold"):
        function(np.array([[7.0, 1.0]]))


@pytest.mark.parametrize("ratio", [0.9, 0.0, float("nan"), float("inf")])
def test_weights_that_fall_are_refused(ratio):
    with pytest.raises(MegalinError, match=r"depth_ratio = .*at least 1"):
        weighted_average([[True]], depth_ratio=ratio)
    with pytest.raises(MegalinError, match=r"length_ratio = .*at least 1"):
        niah_score([[True]], length_ratio=ratio)
