"""How far rounding to bf16 takes one process: the yardstick of a mesh in bf16 (docs/adr/0004-bf16-bounds.md)."""

from __future__ import annotations

import torch

from megalin.verify.case import Case
from megalin.verify.comparison import Rounding, error, kind, role
from megalin.verify.outcome import Outcome, run_reference

NUM_DRAWS = 16
"""One process in bf16 with its weights rounded to the nearest, and the others with weights rounded by chance."""


def measure_rounding(case: Case, truth: Outcome, device: torch.device) -> Rounding:
    """The largest error of one process in bf16 against `truth`, one in fp32, over all tensors of a role and all draws.

    The norm of the gradients and the weights after the step are left out: they follow from the gradients without bf16.
    """
    largest: dict[str, float] = {}
    for draw in range(NUM_DRAWS):
        dither = torch.Generator(device).manual_seed(draw) if draw else None
        for name, found in _errors(case, truth, device, dither):
            largest[role(name)] = max(largest.get(role(name), 0.0), found)
    return largest


def _errors(
    case: Case, truth: Outcome, device: torch.device, dither: torch.Generator | None
) -> list[tuple[str, float]]:
    """The errors of one draw, whose tensors never leave the device."""
    narrow = run_reference(case, torch.bfloat16, device, dither=dither)
    names = [name for name in truth if kind(name) not in ("grad_norm", "weight")]
    return [(name, error(name, narrow[name], truth[name], device)) for name in names]
