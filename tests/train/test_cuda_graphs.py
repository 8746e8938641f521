"""Refused CUDA graphs of steps; tests/gpu/test_cuda_graphs_gpu.py compares the bits of those that run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalin.errors import ConfigError
from megalin.parallel import sequence_documents
from megalin.train.cuda_graphs import GradientGraph
from tests.cases import build, model


def graph_on(device: str) -> GradientGraph:
    mesh: Any = SimpleNamespace(device=torch.device(device))
    model: Any = None
    return GradientGraph(model, mesh)


def test_no_gpu_is_an_error():
    with pytest.raises(ConfigError, match=r"train.cuda_graphs = true, but this run computes on a cpu device"):
        graph_on("cpu")


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_whose_addresses_nccl_would_register_are_an_error(monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with pytest.raises(ConfigError, match=r"expandable_segments:True.*set NCCL_GRAPH_REGISTER=0 in the environment"):
        graph_on("cuda")


ATTENTION = [
    {"type": "softmax", "num_heads": 12},
    {"type": "shared_key_attention", "num_heads": 12, "window": 7, "residual": "two_hop"},
    {"type": "glu", "intermediate_size": 36},
]


def test_host_does_not_read_documents_for_attention_by_masks(monkeypatch):
    packed = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 16], dtype=torch.int32)
    tokens = torch.randint(380, packed.shape)
    losses = {}
    for backend in ("auto", "mask"):
        sublayers = [{**each, "backend": backend} if "num_heads" in each else each for each in ATTENTION]
        built = build(model({"sublayers": sublayers}))
        if backend == "mask":
            monkeypatch.setattr(sequence_documents, "find_documents", None)
        losses[backend] = built(tokens, labels=tokens, document_ids=packed).token_losses
    assert torch.equal(losses["auto"], losses["mask"])
