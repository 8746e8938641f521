"""Training on packed sequences and on single documents: equal losses of each document, step after step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megalin.model.language_model import LanguageModel
from megalin.parallel.cross_entropy import IGNORED_LABEL
from tests.cases import CASES, LENGTH, Case, Inputs, build, make_inputs

STEPS = 3


def documents(inputs: Inputs) -> list[Inputs]:
    """Each packed document as a sequence of its own."""
    found = []
    for tokens, labels, ids in zip(*inputs, strict=True):
        _, lengths = ids.unique_consecutive(return_counts=True)
        parts = zip(tokens.split(lengths.tolist()), labels.split(lengths.tolist()), strict=True)
        found += [Inputs(t[None], y[None], torch.zeros(1, len(t), dtype=torch.int32)) for t, y in parts]
    return found


def train(model: LanguageModel, batches: Sequence[Inputs]) -> list[Tensor]:
    """Losses of all tokens in order, [tokens], before each step and after the last."""
    count = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    history = []
    for _ in range(STEPS + 1):
        outputs = [model(batch.tokens, labels=batch.labels, document_ids=batch.document_ids) for batch in batches]
        losses = torch.cat([output.token_losses.flatten() for output in outputs])
        history.append(losses.detach())
        (losses.sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_optimizer_step()
    return history


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (not case.representative)) for case in CASES],
)
def test_packed_and_single_documents_train_alike(case: Case):
    packed = make_inputs()
    singles = documents(packed)
    assert len(singles) > len(packed.tokens)
    assert sum(single.tokens.numel() for single in singles) == 4 * LENGTH
    together, apart = train(build(case.model), [packed]), train(build(case.model), singles)
    for losses, others in zip(together, apart, strict=True):
        torch.testing.assert_close(losses, others, rtol=1e-9, atol=1e-11)
    assert (together[0] - together[-1]).abs().max() > 1e-2
