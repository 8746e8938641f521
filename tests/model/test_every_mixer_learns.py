"""Forty steps of AdamW on a few packed sequences, which every mixer can learn."""

import pytest
import torch

from tests.cases import CASES, REPRESENTATIVES, Case, build, make_inputs

STEPS = 40


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c in REPRESENTATIVES else pytest.mark.slow) for c in CASES]
)
def test_loss_falls_by_half_in_forty_steps(case: Case):
    model, inputs = build(case.model, dtype=torch.float32), make_inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        output = model(inputs.tokens, labels=inputs.labels, document_ids=inputs.document_ids)
        loss = output.token_losses.sum() / (output.token_losses > 0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_optimizer_step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, (losses[0], losses[-1])
