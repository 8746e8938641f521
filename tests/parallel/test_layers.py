"""Every tensor-parallel layer on 2, 3 and 4 ranks against dense maths on the whole weights, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.parallel.collectives import all_gather, local_slice
from megalin.parallel.embedding import VocabParallelTable
from megalin.parallel.linear import ColumnParallelLinear, LowRankLinear, NormedRowParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import TensorParallel, full_tensor
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, materialise, to_arrays, to_tensors
from tests.ranks import run_ranks

BATCH, LENGTH, WIDTH, INNER, RANK, VOCAB = 2, 12, 24, 36, 5, 380
EPS = 0.3
Weights = dict[str, Tensor]


class ColumnRow(nn.Module):
    """(x W_1 * x W_2) W_3."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.up = ColumnParallelLinear(WIDTH, INNER, parts=2, tp=tp, std=0.3, name="inner")
        self.down = RowParallelLinear(INNER, WIDTH, tp=tp, std=0.3, name="inner")

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.tp.enter(x))
        return self.down(a * b)

    @staticmethod
    def dense(w: Weights, x: Tensor) -> Tensor:
        return ((x @ w["up.weight"][0].T) * (x @ w["up.weight"][1].T)) @ w["down.weight"].T


class GatedNorm(nn.Module):
    """(SRMSNorm(x W) * sigmoid(x W_down W_up)) W_o: two layers read one entered input."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.value = ColumnParallelLinear(WIDTH, INNER, tp=tp, std=0.3, name="inner")
        self.gate = LowRankLinear(WIDTH, RANK, INNER, tp=tp, std=0.3, name="inner")
        self.out = NormedRowParallelLinear(INNER, WIDTH, eps=EPS, tp=tp, std=0.3, name="inner")

    def forward(self, x: Tensor) -> Tensor:
        x = self.tp.enter(x)
        return self.out(self.value(x)[0], torch.sigmoid(self.gate(x)))

    @staticmethod
    def dense(w: Weights, x: Tensor) -> Tensor:
        v = x @ w["value.weight"][0].T
        normed = v / ((v * v).mean(-1, keepdim=True) + EPS).sqrt()
        return (normed * torch.sigmoid(x @ w["gate.down"].T @ w["gate.up"].T)) @ w["out.weight"].T


class LowRankRow(nn.Module):
    """tanh(x W_down W_up) W_o."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.low = LowRankLinear(WIDTH, RANK, INNER, tp=tp, std=0.3, name="inner")
        self.out = RowParallelLinear(INNER, WIDTH, tp=tp, std=0.3, name="inner")

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.low(self.tp.enter(x)).tanh())

    @staticmethod
    def dense(w: Weights, x: Tensor) -> Tensor:
        return (x @ w["low.down"].T @ w["low.up"].T).tanh() @ w["out.weight"].T


LAYERS: dict[str, type[ColumnRow | GatedNorm | LowRankRow]] = {
    "column_row": ColumnRow,
    "gated_norm": GatedNorm,
    "low_rank": LowRankRow,
}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_ids() -> Tensor:
    """Ids at both ends of the vocabulary and of each rank's rows among them."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    ids[0, :9] = torch.tensor([0, VOCAB - 1, 95, 96, 127, 128, 191, 192, 256])
    return ids


def _stream(tensor: Tensor, tp: TensorParallel, back: bool = False) -> Tensor:
    """A whole residual stream as this rank holds it, or the way back."""
    if not tp.sequence_parallel:
        return tensor
    if back:
        return all_gather(tensor, tp.axis, dim=1)
    return local_slice(tensor, tp.axis, dim=1).contiguous()


def _run_stream_layer(name: str, tp: TensorParallel) -> dict[str, Tensor]:
    layer = LAYERS[name](tp).double()
    materialise(layer)
    x = _stream(draw(1, BATCH, LENGTH, WIDTH), tp).requires_grad_()
    y = layer(x)
    y.backward(_stream(draw(2, BATCH, LENGTH, WIDTH), tp))
    found = {"y": _stream(y.detach(), tp, back=True), "dx": _stream(x.grad, tp, back=True)}
    for weight_name, weight in layer.named_parameters():
        found |= {f"w.{weight_name}": full_tensor(weight.detach()), f"g.{weight_name}": full_tensor(weight.grad)}
    return found


def _run_table(tp: TensorParallel) -> dict[str, Tensor]:
    """The table as embedding and as head: y = tanh(embed(tokens)) through the head."""
    table = VocabParallelTable(VOCAB, WIDTH, tp=tp, std=0.3).double()
    materialise(table)
    rows = table.embed(token_ids())
    logits = table.logits(rows.tanh())
    local_gradient = local_slice(draw(3, BATCH, LENGTH, 384), tp.axis, dim=2)
    logits.backward(local_gradient)
    return {
        "rows": _stream(rows.detach(), tp, back=True),
        "logits": all_gather(logits.detach(), tp.axis, dim=2),
        "w": full_tensor(table.weight.detach()),
        "g": full_tensor(table.weight.grad),
    }


def _run(sequence_parallel: bool) -> dict[str, Arrays]:
    tp = make_mesh(torch.distributed.get_world_size(), sequence_parallel=sequence_parallel).tp
    found = {name: to_arrays(_run_stream_layer(name, tp)) for name in LAYERS}
    return found | {"table": to_arrays(_run_table(tp))}


@lru_cache
def results(world_size: int, sequence_parallel: bool) -> list[dict[str, Arrays]]:
    return run_ranks(world_size, _run, sequence_parallel)


def with_gradients(function: Callable[[Weights, Tensor], Tensor], weights: Weights) -> dict[str, Tensor]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    x = draw(1, BATCH, LENGTH, WIDTH).requires_grad_()
    y = function(leaves, x)
    y.backward(draw(2, BATCH, LENGTH, WIDTH))
    found = {"y": y.detach(), "dx": x.grad}
    for name, leaf in leaves.items():
        found |= {f"w.{name}": leaf.detach(), f"g.{name}": leaf.grad}
    return found


every_mesh = pytest.mark.parametrize("world_size", [2, 3, 4])
both_layouts = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence_parallel"])


@every_mesh
@both_layouts
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_dense_maths(name: str, world_size: int, sequence_parallel: bool):
    one_process = LAYERS[name](TensorParallel()).double()
    materialise(one_process)
    weights = {key: weight.detach() for key, weight in one_process.named_parameters()}
    expected = with_gradients(LAYERS[name].dense, weights)
    for arrays in results(world_size, sequence_parallel):
        assert_close(to_tensors(arrays[name]), expected, 1e-12)


@every_mesh
@both_layouts
def test_the_table_equals_a_dense_one(world_size: int, sequence_parallel: bool):
    weight = to_tensors(results(world_size, sequence_parallel)[0]["table"])["w"].requires_grad_()
    rows = functional.embedding(token_ids(), weight)
    logits = rows.tanh() @ weight.T
    padding = torch.arange(384) >= VOCAB
    logits.backward(draw(3, BATCH, LENGTH, 384).masked_fill(padding, 0.0))
    expected = {"rows": rows, "logits": logits[..., :VOCAB], "w": weight, "g": weight.grad}
    for arrays in results(world_size, sequence_parallel):
        found = to_tensors(arrays["table"])
        assert found["logits"][..., VOCAB:].eq(float("-inf")).all()
        assert found["w"][VOCAB:].eq(0).all()
        assert found["w"][:VOCAB].ne(0).all()
        found["logits"] = found["logits"][..., :VOCAB]
        assert_close(found, {name: tensor.detach() for name, tensor in expected.items()}, 1e-12)


@pytest.mark.parametrize("vocab_size", [1, 128, 129, 380])
def test_one_rank_embeds_and_masks_like_many(vocab_size: int):
    table = VocabParallelTable(vocab_size, WIDTH, tp=TensorParallel(), std=0.3)
    materialise(table)
    rows = -(-vocab_size // 128) * 128
    assert table.weight.shape == (rows, WIDTH)
    assert table.padded_parameters() == (rows - vocab_size) * WIDTH
    logits = table.logits(table.embed(torch.tensor([[vocab_size - 1]])))
    assert logits.isfinite().sum() == vocab_size
