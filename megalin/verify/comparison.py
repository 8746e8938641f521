"""Errors between two outcomes, each beside its bound."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.verify.case import Case
from megalin.verify.outcome import OPTIMIZER, Outcome

RELATIVE_BOUND = {"float64": 1e-10, "float32": 2e-5}
"""||a - b|| / ||b|| of logits, losses, gradients and their norm."""
WEIGHT_BOUND = {"float64": 1e-7, "float32": 2e-2}
"""Root mean square of the difference of a weight after the step, in units of the learning rate. AdamW divides each
gradient element by its own magnitude, so rounding of the smallest elements is amplified up to lr / eps."""
BF16_FACTOR, BF16_FLOOR = 2.0, 2e-3
"""bf16: at most this factor times the error of one process in bf16, tensor by tensor, and no bound below the floor."""


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
    """One row a tensor. `truth` is one process in at least fp32; `same_dtype` one process in bf16, for bf16."""
    assert outcome.keys() == truth.keys(), outcome.keys() ^ truth.keys()
    rows = []
    for name, expected in truth.items():
        if same_dtype is not None:
            bound = max(BF16_FLOOR, BF16_FACTOR * _error(name, same_dtype[name], expected))
        else:
            bound = (WEIGHT_BOUND if kind(name) == "weight" else RELATIVE_BOUND)[case.dtype]
        rows.append(Row(name, _error(name, outcome[name], expected), bound))
    return rows


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
