"""Errors between two outcomes, each beside its bound."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.verify.case import Case
from megalin.verify.outcome import OPTIMIZER, Outcome

RELATIVE_BOUND = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-3}
"""||a - b|| / ||b|| of logits, losses, gradients and their norm."""
WEIGHT_BOUND = {"float64": 1e-7, "float32": 2e-2, "bfloat16": 2e-3}
"""Root mean square of the difference of a weight after the step, in units of the learning rate. AdamW divides each
gradient element by its own magnitude, so rounding of the smallest elements is amplified up to lr / eps."""
SAME_DTYPE_FACTOR = 2.0
"""Below fp64, a tensor that one process in the same dtype computes worse than that may err by this factor as much."""


class Row(NamedTuple):
    """One tensor's error against one process; it passes while error <= bound."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the bound holds; a NaN does not."""
        return self.error <= self.bound


def compare(case: Case, outcome: Outcome, truth: Outcome, same_dtype: Outcome | None) -> list[Row]:
    """One row a tensor. `truth` is one process in a wider dtype, `same_dtype` one process in the case's own; for fp64
    the truth itself is in fp64, and there is no other."""
    assert outcome.keys() == truth.keys(), outcome.keys() ^ truth.keys()
    rows = []
    for name, expected in truth.items():
        error = _error(name, outcome[name], expected)
        bound = (WEIGHT_BOUND if name.startswith("weight:") else RELATIVE_BOUND)[case.dtype]
        if same_dtype is not None:
            bound = max(bound, SAME_DTYPE_FACTOR * _error(name, same_dtype[name], expected))
        rows.append(Row(name, error, bound))
    return rows


def _error(name: str, actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.to(torch.float64), expected.to(torch.float64)
    difference = (actual - expected).norm().item()
    if name.startswith("weight:"):
        return difference / expected.numel() ** 0.5 / OPTIMIZER.lr
    scale = expected.norm().item()
    return difference / scale if scale else difference
