"""Runs whose attention reads document boundaries, with CUDA graphs: bit for bit equal to runs without."""

from pathlib import Path

import pytest
import torch

from megalin.ops.attention.flash import flash_attention, is_installed
from megalin.ops.documents import DocumentBounds, declare_bounds, find_documents
from megalin.train import cuda_graphs
from megalin.train.cuda_graphs import WARM_UP_STEPS, GradientGraph
from tests.gpu.test_cuda_graphs_gpu import assert_equal_runs, automatic_and_eager, count_replays
from tests.model_runs import STEPS

SOFTMAX = """model.layers.0.sublayers=[{type = "softmax", num_heads = 2},
    {type = "glu", intermediate_size = 32}]"""
LOCAL = """model.layers.0.sublayers=[{type = "shared_key_attention", num_heads = 2, window = 7, residual = "two_hop"},
    {type = "softmax", num_heads = 4, num_key_value_heads = 2, window = 9},
    {type = "softmax", num_heads = 2, block_size = 8}, {type = "softmax", num_heads = 1, window = 9, num_sinks = 2},
    {type = "glu", intermediate_size = 32}]"""
BF16 = "train.dtype=bfloat16"
LONG = "data.sequence_length=96"
"""Longer than all documents, so that every micro-batch is packed."""


@pytest.fixture(autouse=True)
def _compiled_again() -> None:
    torch.compiler.reset()


def replays_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Replays of a run with automatic graphs, whose bits are those of a run without."""
    replays = count_replays(monkeypatch)
    assert_equal_runs(*automatic_and_eager(tmp_path, *overrides))
    return len(replays)


@pytest.mark.parametrize(
    "overrides",
    [
        [SOFTMAX, BF16],
        [SOFTMAX],
        [LOCAL, BF16],
        [LOCAL, BF16, "train.recompute=true", "model.hidden_dropout=0.1"],
        [SOFTMAX, BF16, "train.compile=true", "train.recompute=true"],
        [LOCAL, BF16, "train.compile=true"],
    ],
    ids=["softmax", "softmax_fp32", "windows_and_blocks", "recomputed", "compiled_recomputed", "compiled"],
)
def test_graphs_change_no_bit_of_packed_attention(tmp_path, monkeypatch, overrides):
    assert replays_of(tmp_path, monkeypatch, LONG, *overrides) >= (STEPS - WARM_UP_STEPS) // 2


def test_graphs_change_no_bit_of_whole_sequences(tmp_path, monkeypatch):
    whole = "data.isolate_documents=false"
    assert replays_of(tmp_path, monkeypatch, SOFTMAX, BF16, whole) == STEPS - WARM_UP_STEPS


def test_graphs_change_no_bit_of_steps_that_are_packed_or_not(tmp_path, monkeypatch):
    """Sequences of 18 tokens are often one document: graphs are dropped and captured again."""
    captures, record = [], GradientGraph._record
    monkeypatch.setattr(GradientGraph, "_record", lambda *given: (captures.append(1), record(*given))[1])
    small = ["data.sequence_length=18", "train.global_batch_size=2", "train.micro_batch_size=2"]
    assert 0 < replays_of(tmp_path, monkeypatch, LOCAL, BF16, *small) < STEPS - WARM_UP_STEPS
    assert len(captures) > 1


def test_a_graph_whose_batch_is_not_replaced_is_seen(tmp_path, monkeypatch):
    """The comparison of this file sees documents of another batch."""

    def copy_others(function, *batches):
        if function is torch.Tensor.copy_:
            recorded, batch = batches
            return original(function, recorded._replace(document_ids=batch.document_ids), batch)
        return original(function, *batches)

    original = cuda_graphs.map_fields
    monkeypatch.setattr(cuda_graphs, "map_fields", copy_others)
    with pytest.raises(AssertionError):
        replays_of(tmp_path, monkeypatch, LONG, SOFTMAX, BF16)


@pytest.mark.parametrize(
    "kernel",
    [
        "torch",
        pytest.param(
            "flash_attn_4", marks=pytest.mark.skipif(not is_installed("flash-attn-4"), reason="needs flash-attn-4")
        ),
    ],
)
@pytest.mark.parametrize("heads", [1, 2, 16])
@pytest.mark.parametrize("lengths", [(5, 40, 83), (1,) * 128])
@pytest.mark.parametrize("window", [None, 7, 100])
def test_bounds_change_no_bit_of_attention(heads, lengths, window, kernel):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to("cuda", torch.int32)[None]
    q, k, v, dy = (torch.randn(1, 128, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    exact = None
    for bounds in (None, DocumentBounds(len(lengths) * 3, 128), DocumentBounds(1024, 4096)):
        documents = find_documents(ids, bounds)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = flash_attention(*leaves, documents=documents, window=window, kernel=kernel)
        found = [y, *torch.autograd.grad(y, leaves, dy)]
        exact = exact or found
        assert all(map(torch.equal, found, exact)), bounds


def test_documents_in_a_graph_are_those_of_each_replay():
    """Found inside of a capture, without a wait or a copy from the host."""

    static, graph = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
    declare_bounds(static, DocumentBounds(4, 4))
    with torch.cuda.graph(graph):
        documents = find_documents(static)
    for ids, offsets in (((0, 1, 2, 2, 3, 3), [0, 1, 2, 4, 6]), ((0, 0, 0, 0, 1, 1), [0, 4, 6, 6, 6])):
        static.copy_(torch.tensor([ids]))
        graph.replay()
        assert documents.offsets.tolist() == offsets
        assert documents.sizes.tolist() == [4, 4]
