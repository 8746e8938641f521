"""Measured rounding of one process, from which bounds for a mesh follow: in bf16 or fp16, and in fp32 if a mesh exceeds
its bound (docs/adr/0004-bf16-bounds.md)."""

from __future__ import annotations

import torch

from megalin.verify.case import Case
from megalin.verify.comparison import Rounding, error, kind, role
from megalin.verify.outcome import Outcome, on_host, run_reference

NUM_DRAWS = 16
"""Number of processes in bf16 or fp16: one with weights rounded to nearest, the others stochastically."""


def measure_rounding(case: Case, truth: Outcome, device: torch.device) -> Rounding:
    """The largest error of one process in the compute dtype, bf16 or fp16, against `truth`, one in fp32, over all
    tensors of a role and all draws.

    The gradient norm and the weights after the step are excluded: they follow from the gradients in fp32.
    """
    found: list[tuple[str, float]] = []
    for draw in range(NUM_DRAWS):
        dither = torch.Generator(device).manual_seed(draw) if draw else None
        narrow = run_reference(case, case.compute_dtype, device, dither=dither)
        found += _errors(narrow, truth, _without(truth, "grad_norm", "weight"), device)
    return _largest(found)


def measure_fp32(case: Case, narrow: Outcome, device: torch.device) -> tuple[Outcome, Rounding]:
    """One process in fp64 from the same weights, and the largest error of `narrow`, one in fp32, against it, over all
    tensors of a role.

    The weights after the step are those of `narrow`: AdamW amplifies the rounding of small gradients in them.
    """
    wide = on_host(run_reference(case, torch.float64, device, recompute=True))
    names = _without(wide, "weight")
    return narrow | {name: wide[name] for name in names}, _largest(_errors(narrow, wide, names, device))


def _without(outcome: Outcome, *kinds: str) -> list[str]:
    return [name for name in outcome if kind(name) not in kinds]


def _errors(narrow: Outcome, truth: Outcome, names: list[str], device: torch.device) -> list[tuple[str, float]]:
    total = float(truth["grad_norm"])
    return [(name, error(name, narrow[name], truth[name], device, total)) for name in names]


def _largest(errors: list[tuple[str, float]]) -> Rounding:
    largest: dict[str, float] = {}
    for name, found in errors:
        largest[role(name)] = max(largest.get(role(name), 0.0), found)
    return largest
