"""Errors between two outcomes, each beside its bound."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.verify.case import Case
from megalin.verify.outcome import OPTIMIZER, Outcome

RELATIVE_BOUND = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-3}
"""||a - b|| / ||b|| of logits, losses, gradients and their norm."""
WEIGHT_BOUND = {"float64": 1e-7, "float32": 2e-2, "bfloat16": 0.5}
"""Root mean square of the difference of a weight after the step, in units of the learning rate. AdamW divides each
gradient element by its own magnitude: every element moves by about one unit, and where rounding turns the sign of a
gradient near zero, by one too many. In bf16 that happens to some; with a wrong gradient the difference is 1.4."""
SAME_DTYPE_FACTOR = 2.0
"""Below fp64, a bound is at least this factor times the largest error that one process in the same dtype makes in any
tensor of the same kind. Of the kind: in a tensor of few elements the error of one run is chance, and so is a bound."""


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
    bounds: dict[str, float] = {}
    for name, expected in truth.items():
        floor = (WEIGHT_BOUND if kind(name) == "weight" else RELATIVE_BOUND)[case.dtype]
        alone = 0.0 if same_dtype is None else SAME_DTYPE_FACTOR * _error(name, same_dtype[name], expected)
        bounds[kind(name)] = max(floor, alone, bounds.get(kind(name), 0.0))
    return [Row(name, _error(name, outcome[name], expected), bounds[kind(name)]) for name, expected in truth.items()]


def kind(name: str) -> str:
    """What an outcome's tensor is: logits, token_losses, loss, grad_norm, gradient or weight."""
    return name.partition(":")[0].partition(".")[0]


def _error(name: str, actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.to(torch.float64), expected.to(torch.float64)
    difference = (actual - expected).norm().item()
    if kind(name) == "weight":
        return difference / expected.numel() ** 0.5 / OPTIMIZER.lr
    scale = expected.norm().item()
    return difference / scale if scale else difference
