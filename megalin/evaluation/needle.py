"""Metrics of needle-in-a-haystack tests: accuracies by context length, the weighted average and the NIAH score.

Every function takes `success`, bool [depths, lengths]: whether the needle was found at each depth, shallow first, in
each context, short first. Source: Scaling Laws for Linear Complexity Language Models, section 3.4 and appendix B.1.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megalin.errors import OperandError

DEFAULT_RATIO = 1.2
"""Growth of the weights from one depth, or one length, to the next. The paper prints no value; this one is ours."""

Success = npt.ArrayLike
Accuracies = npt.NDArray[np.float64]


def accuracy_at_length(success: Success) -> Accuracies:
    """acc@L: mean of each length's column over the depths, float64 [lengths]. Raises OperandError as `niah_score`."""
    return _checked(success).mean(axis=0)


def accuracy_up_to_length(success: Success) -> Accuracies:
    """acc<=L: mean over all depths and all lengths up to each one, itself included, float64 [lengths].

    Raises OperandError as `niah_score`.
    """
    columns = _checked(success).mean(axis=0)
    return np.cumsum(columns) / np.arange(1, columns.size + 1)


def mean_accuracy(success: Success) -> float:
    """Mean over all depths and lengths. Raises OperandError as `niah_score`."""
    return float(_checked(success).mean())


def weighted_average(
    success: Success, depth_ratio: float = DEFAULT_RATIO, length_ratio: float = DEFAULT_RATIO
) -> float:
    """sum_ij W_ij s_ij with W_ij = a_d^i a_c^j / (sum of all), for depth step i and length j from 0.

    Args:
        success: bool [depths, lengths], shallow first, short first.
        depth_ratio: a_d, at least 1; 1 weights all depths equally.
        length_ratio: a_c, likewise for lengths.

    Returns:
        A number in [0, 1], summed in float64.

    Raises:
        OperandError: as `niah_score`.
    """
    found = _checked(success)
    return float((_weights(found.shape, depth_ratio, length_ratio) * found).sum())


def niah_score(success: Success, depth_ratio: float = DEFAULT_RATIO, length_ratio: float = DEFAULT_RATIO) -> float:
    """sum_ij W_ij s_ij p_j: the weighted average with the penalty p_j on lengths whose depths disagree.

    With n the number of runs of equal outcomes in the column of length j, from the first depth to the last:
    p_j = 0 where no depth succeeds, 1 where every depth does, else 2^((1 - n) / 2).

    Args:
        success: bool [depths, lengths], shallow first, short first.
        depth_ratio: a_d of `weighted_average`.
        length_ratio: a_c of `weighted_average`.

    Returns:
        A number in [0, 1], summed in float64; at most `weighted_average` of the same arguments.

    Raises:
        OperandError: `success` is not a matrix, is empty or has other values than true and false (1 and 0), or a ratio
            is not a finite number of at least 1.
    """
    found = _checked(success)
    weights = _weights(found.shape, depth_ratio, length_ratio)
    return float((weights * found * _penalties(found)).sum())


def _penalties(found: npt.NDArray[np.bool_]) -> Accuracies:
    """p_j of each column, [lengths]."""
    num_runs = 1 + np.count_nonzero(found[1:] != found[:-1], axis=0)  # [lengths]
    partial = 2.0 ** ((1 - num_runs) / 2)
    return np.where(found.all(axis=0), 1.0, np.where(found.any(axis=0), partial, 0.0))


def _weights(shape: tuple[int, ...], depth_ratio: float, length_ratio: float) -> Accuracies:
    """W, [depths, lengths]: the outer product of two geometric progressions, with sum 1."""
    for name, ratio in (("depth_ratio", depth_ratio), ("length_ratio", length_ratio)):
        if not (math.isfinite(ratio) and ratio >= 1):
            raise OperandError(f"{name} = {ratio}: the weights must not fall; give a finite number of at least 1")
    depths, lengths = (
        _progression(count, ratio) for count, ratio in zip(shape, (depth_ratio, length_ratio), strict=True)
    )
    return np.outer(depths, lengths)


def _progression(count: int, ratio: float) -> Accuracies:
    """[count] weights ratio^i with sum 1. Counted from the last, so that none overflows."""
    weights = float(ratio) ** np.arange(1 - count, 1, dtype=np.float64)
    return weights / weights.sum()


def _checked(success: Success) -> npt.NDArray[np.bool_]:
    """`success` as bool [depths, lengths]."""
    values = np.asarray(success)
    if values.ndim != 2 or values.size == 0:
        raise OperandError(
            f"success has the shape {list(values.shape)}; it must be [depths, lengths] with at least one of each"
        )
    if values.dtype != np.bool_ and not np.isin(values, (0, 1)).all():
        raise OperandError("success has values other than true and false; compare the scores with a threshold first")
    return values.astype(np.bool_)
