"""CUDA graph of a baseline's forward and backward: the losses and weights of eager steps."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

TOOLS = str(Path(__file__).parents[2] / "tools")


class Bigrams(nn.Module):
    """Predicts a token from the one before, with the interface of other libraries' models."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, input_ids, labels, use_cache):
        logits = self.head(self.embedding(input_ids)).flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels.roll(-1, 1).flatten()))


@pytest.mark.parametrize("steps", [3, 8])
def test_a_graph_has_the_losses_and_weights_of_eager_steps(monkeypatch, steps):
    monkeypatch.setattr(sys, "path", [TOOLS, *sys.path])
    from train_benchmarks.baselines import baseline_step

    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = Bigrams().cuda()
        tokens = [torch.randint(50, (4, 16), device="cuda") for _ in range(steps)]
        step = baseline_step(model, tokens, lr=0.1, graph=graph)
        losses = [step(index).wait() for index in range(steps)]
        results.append((losses, [x.detach().clone() for x in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert len(set(results[0][0])) == steps
    for eager, replayed in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(eager, replayed)
