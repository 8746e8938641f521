"""Errors between two outcomes and their bounds (docs/adr/0004-bf16-bounds.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.verify.case import Case
from megalin.verify.float8 import CODES, MAGNITUDES, SCALES
from megalin.verify.outcome import OPTIMIZER, Outcome

RELATIVE_BOUND = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5, "float8": 1e-10}
"""Bound of ||a - b|| / ||b|| of logits, losses, gradients and their norm; in bf16 and fp16 their smallest bound."""
WEIGHT_BOUND = {"float64": 1e-7, "float32": 2e-2, "bfloat16": 1e-3, "float16": 1e-3, "float8": 1e-7}
"""Bound of the root mean square difference of a weight after the step, in units of the learning rate. AdamW divides
each gradient element by its own magnitude, so rounding of the smallest elements is amplified up to lr / eps. bf16 and
fp16: from the same gradients, so only the rounding of weights in fp32 remains, 5e-4 at a magnitude of 8."""
ZERO_GRADIENT = 2.0**-48
"""Gradients whose norm is at most this fraction, 16 units of fp64, of that of all gradients are rounding errors of
zero, as of queries and keys in windows of one token. Their error is measured in units of the norm of all gradients."""
ROUNDING_FACTOR = 2.0
"""Factor on the measured rounding of one process; the product is the bound for tensors of the same role."""

COUNTED = (CODES, SCALES, MAGNITUDES)
"""Kinds of tensors of which the error is the number of elements that differ, and the bound zero."""

Rounding = Mapping[str, float]
"""Largest relative error of one process by role: in bf16 against fp32, or in fp32 against fp64."""


class TensorError(NamedTuple):
    """Error of one tensor against one process; it passes if error <= bound."""

    name: str
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """The error in units of its bound; infinite beyond a bound of zero."""
        if self.bound == 0.0:
            return 0.0 if self.error == 0.0 else float("inf")
        return self.error / self.bound

    @property
    def passed(self) -> bool:
        """True if the error is within the bound; a NaN is not."""
        return self.error <= self.bound


def compare(
    case: Case, outcome: Outcome, truth: Outcome, rounding: Rounding | None, device: torch.device
) -> list[TensorError]:
    """Compares an outcome with the truth, tensor by tensor.

    Args:
        truth: one process in at least fp32.
        rounding: widens the bounds, if it was measured.
        device: computes the errors, one tensor at a time.
    """
    assert outcome.keys() == truth.keys(), outcome.keys() ^ truth.keys()
    rows = []
    total = float(truth.get("grad_norm", 0.0))
    for name, expected in truth.items():
        bound = (WEIGHT_BOUND if kind(name) == "weight" else RELATIVE_BOUND)[case.dtype]
        if kind(name) in COUNTED:
            bound = 0.0
        if rounding is not None:
            bound = max(bound, ROUNDING_FACTOR * rounding.get(role(name), 0.0))
        rows.append(TensorError(name, error(name, outcome[name], expected, device, total), bound))
    return rows


def kind(name: str) -> str:
    """Kind of an outcome's tensor: logits, token_losses, loss, grad_norm, gradient, weight or decoding; codes, scales
    or magnitudes of FP8 matmuls."""
    return name.partition(":")[0].partition(".")[0]


def role(name: str) -> str:
    """The name without the index of the micro-batch or block, common to tensors of one role."""
    return re.sub(r"(?<=:blocks\.)\d+", "*", name) if ":" in name else kind(name)


def error(name: str, actual: Tensor, expected: Tensor, device: torch.device, total: float = 0.0) -> float:
    """The difference in the units of the bounds, summed in fp64 on `device`; inf for another shape.

    `total`: norm of all gradients, the unit of those that are zero but for rounding; 0: no tensor is such a gradient.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if kind(name) in COUNTED:
        return float((actual != expected).sum())
    actual, expected = actual.to(device, torch.float64), expected.to(device, torch.float64)
    difference = (actual - expected).norm().item()
    if kind(name) == "weight":
        return difference / expected.numel() ** 0.5 / OPTIMIZER.lr
    scale = expected.norm().item()
    if kind(name) == "gradient" and scale <= ZERO_GRADIENT * total:
        scale = total
    return difference / scale if scale else difference
