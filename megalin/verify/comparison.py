"""Errors between two outcomes, each beside its bound (docs/adr/0004-bf16-bounds.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.verify.case import Case
from megalin.verify.outcome import OPTIMIZER, Outcome

RELATIVE_BOUND = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-5}
"""||a - b|| / ||b|| of logits, losses, gradients and their norm; in bf16 the least of their bounds."""
WEIGHT_BOUND = {"float64": 1e-7, "float32": 2e-2, "bfloat16": 1e-3}
"""Root mean square of the difference of a weight after the step, in units of the learning rate. AdamW divides each
gradient element by its own magnitude, so rounding of the smallest elements is amplified up to lr / eps. bf16: from the
same gradients, so what is left is the rounding of weights in fp32, 5e-4 at a magnitude of 8."""
ROUNDING_FACTOR = 2.0
"""Where rounding is measured, a bound is this factor times that of one process in tensors of that role."""

Rounding = Mapping[str, float]
"""By role: the largest relative error of one process in bf16 against one in fp32, or in fp32 against one in fp64."""


class TensorError(NamedTuple):
    """One tensor's error against one process; it passes while error <= bound."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the bound holds; a NaN does not."""
        return self.error <= self.bound


def compare(
    case: Case, outcome: Outcome, truth: Outcome, rounding: Rounding | None, device: torch.device
) -> list[TensorError]:
    """One row a tensor. `truth` is one process in at least fp32; `rounding`, where it was measured, widens the bounds;
    `device` does the sums, one tensor after the other."""
    assert outcome.keys() == truth.keys(), outcome.keys() ^ truth.keys()
    rows = []
    for name, expected in truth.items():
        bound = (WEIGHT_BOUND if kind(name) == "weight" else RELATIVE_BOUND)[case.dtype]
        if rounding is not None:
            bound = max(bound, ROUNDING_FACTOR * rounding.get(role(name), 0.0))
        rows.append(TensorError(name, error(name, outcome[name], expected, device), bound))
    return rows


def kind(name: str) -> str:
    """What an outcome's tensor is: logits, token_losses, loss, grad_norm, gradient or weight."""
    return name.partition(":")[0].partition(".")[0]


def role(name: str) -> str:
    """The name without the index of the micro-batch or block: what a tensor shares with its likes."""
    return re.sub(r"(?<=:blocks\.)\d+", "*", name) if ":" in name else kind(name)


def error(name: str, actual: Tensor, expected: Tensor, device: torch.device) -> float:
    """The difference in the units of the bounds, summed in fp64 on `device`; inf for another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.to(device, torch.float64), expected.to(device, torch.float64)
    difference = (actual - expected).norm().item()
    if kind(name) == "weight":
        return difference / expected.numel() ** 0.5 / OPTIMIZER.lr
    scale = expected.norm().item()
    return difference / scale if scale else difference
