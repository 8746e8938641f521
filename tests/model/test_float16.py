"""Every mixer's reference in float16 on a CPU: its loss and gradients, from a scaled loss, are those of fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalin.verify.outcome import round_weights
from tests import cases, encoder_cases
from tests.numerics import Tensors

LOSS_SCALE = 64.0
LOSS_BOUND, GRADIENT_BOUND = 5e-4, 0.04
"""Largest relative errors; bf16's are eight times as large."""


FAST = ("tnl", "hgrn2", "softmax-grouped", "mamba2", "gla", "heads")
"""One case of each kind of state, without the slow tests."""


def decoder_step(case: cases.Case, dtype: torch.dtype) -> Tensors:
    return step(cases.build(case.model, dtype=torch.float32), cases.make_inputs()._asdict(), dtype)


def encoder_step(case: encoder_cases.Case, dtype: torch.dtype) -> Tensors:
    inputs = encoder_cases.make_batch(case.model).inputs()
    return step(encoder_cases.build(case.model, dtype=torch.float32), inputs, dtype)


def step(model: Any, inputs: dict[str, Any], dtype: torch.dtype) -> Tensors:
    """The sums of the losses, and the gradients of a scaled mean, unscaled again."""
    round_weights(model, dtype)
    losses = model.loss_sums(inputs)
    (losses.sum() / 100 * LOSS_SCALE).backward()
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return {"losses": losses.detach(), "gradients": gradients / LOSS_SCALE}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("take_step", "case"),
    [
        pytest.param(take_step, case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for take_step, every in ((decoder_step, cases.CASES), (encoder_step, encoder_cases.CASES))
        for case in every
    ],
)
def test_every_mixer_computes_in_float16(take_step: Callable[[Any, torch.dtype], Tensors], case: Any):
    found, expected = (take_step(case, dtype) for dtype in (torch.float16, torch.float32))
    assert found["losses"].dtype == torch.float32
    assert relative_error(found["losses"], expected["losses"]) < LOSS_BOUND
    assert relative_error(found["gradients"], expected["gradients"]) < GRADIENT_BOUND
