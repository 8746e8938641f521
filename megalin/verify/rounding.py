"""How far rounding takes one process: the yardstick of a mesh in bf16 and fp32 (docs/adr/0004-bf16-bounds.md)."""

from __future__ import annotations

import torch

from megalin.verify.case import Case
from megalin.verify.comparison import Rounding, error, kind, role
from megalin.verify.outcome import Outcome, run_reference

NUM_DRAWS = 16
"""One process in bf16 with its weights rounded to the nearest, and the others with weights rounded by chance."""


def rounding_of_bf16(case: Case, truth: Outcome, device: torch.device) -> Rounding:
    """The largest error of one process in bf16 against `truth`, one in fp32, over all tensors of a role and all draws.

    The norm of the gradients and the weights after the step are left out: they follow from the gradients without bf16.
    """
    found = []
    for draw in range(NUM_DRAWS):
        dither = torch.Generator(device).manual_seed(draw) if draw else None
        # Inside of the call: the tensors of one draw are gone before the next.
        found += _errors(run_reference(case, torch.bfloat16, device, dither=dither), truth, device)
    return _largest(found)


def rounding_of_fp32(case: Case, truth: Outcome, device: torch.device) -> Rounding:
    """The largest error of `truth`, one process in fp32, against one in fp64, over all tensors of a role."""
    return _largest(_errors(truth, run_reference(case, torch.float64, device), device))


def _errors(outcome: Outcome, truth: Outcome, device: torch.device) -> list[tuple[str, float]]:
    names = [name for name in truth if kind(name) not in ("grad_norm", "weight")]
    return [(role(name), error(name, outcome[name], truth[name], device)) for name in names]


def _largest(found: list[tuple[str, float]]) -> Rounding:
    largest: dict[str, float] = {}
    for of, size in found:
        largest[of] = max(largest.get(of, 0.0), size)
    return largest
