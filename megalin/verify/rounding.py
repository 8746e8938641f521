"""How far rounding to bf16 takes one process: the yardstick of a mesh in bf16 (docs/adr/0004-bf16-bounds.md)."""

from __future__ import annotations

import torch

from megalin.verify.case import Case
from megalin.verify.comparison import Rounding, error, kind, role
from megalin.verify.outcome import run_reference

NUM_DRAWS = 16
"""Draws of weights and batches, the case's own among them."""


def measure_rounding(case: Case, device: torch.device) -> Rounding:
    """The largest error of one process in bf16 against one in fp32, over all tensors of a role and all draws.

    The norm of the gradients and the weights after the step are left out: they follow from the gradients without bf16.
    """
    largest: dict[str, float] = {}
    for seed in range(case.seed, case.seed + NUM_DRAWS):
        draw = case._replace(seed=seed)
        truth, narrow = (run_reference(draw, dtype, device) for dtype in (torch.float32, torch.bfloat16))
        for name, expected in truth.items():
            if kind(name) not in ("grad_norm", "weight"):
                largest[role(name)] = max(largest.get(role(name), 0.0), error(name, narrow[name], expected))
    return largest
