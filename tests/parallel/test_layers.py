"""Values and gradients of every tensor-parallel layer on 2, 3 and 4 ranks against dense maths on full weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.layers.norms import LayerNorm, RMSNorm
from megalin.parallel.collectives import all_gather, local_slice
from megalin.parallel.embedding import VocabParallelEmbedding
from megalin.parallel.linear import ColumnParallelLinear, LowRankLinear, NormedRowParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import TensorParallel, assign, full_tensor
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
    """(SRMSNorm(x W) * sigmoid(x W_down W_up)) W_o: two layers read one input of `enter`."""

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


class BiasedColumnRow(nn.Module):
    """silu(x W_1 + b_1) * (x W_2 + b_2)) W_3 + b_3."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.up = ColumnParallelLinear(WIDTH, INNER, parts=2, bias=True, tp=tp, std=0.3, name="inner")
        self.down = RowParallelLinear(INNER, WIDTH, bias=True, tp=tp, std=0.3, name="inner")

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.tp.enter(x))
        return self.down(functional.silu(a) * b)

    @staticmethod
    def dense(w: Weights, x: Tensor) -> Tensor:
        a, b = (x @ w["up.weight"][i].T + w["up.bias"][i] for i in range(2))
        return (functional.silu(a) * b) @ w["down.weight"].T + w["down.bias"]


class RMSNormed(nn.Module):
    """RMSNorm(x W + b) W_o + b_o, with weights and biases everywhere."""

    norm = "rmsnorm"

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.value = ColumnParallelLinear(WIDTH, INNER, bias=True, tp=tp, std=0.3, name="inner")
        self.out = NormedRowParallelLinear(
            INNER, WIDTH, eps=EPS, bias=True, tp=tp, std=0.3, name="inner", norm=self.norm
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.value(self.tp.enter(x))[0])

    @staticmethod
    def dense(w: Weights, x: Tensor) -> Tensor:
        v = x @ w["value.weight"][0].T + w["value.bias"][0]
        normed = v / ((v * v).mean(-1, keepdim=True) + EPS).sqrt() * w["out.norm_weight"]
        return normed @ w["out.weight"].T + w["out.bias"]


class LayerNormed(RMSNormed):
    """RMSNormed with LayerNorm and its bias, and a gate between norm and matmul."""

    norm = "layernorm"

    def forward(self, x: Tensor) -> Tensor:
        (v,) = self.value(self.tp.enter(x))
        return self.out(v, torch.sigmoid(v))

    @staticmethod
    def dense(w: Weights, x: Tensor) -> Tensor:
        v = x @ w["value.weight"][0].T + w["value.bias"][0]
        normed = functional.layer_norm(v, (INNER,), w["out.norm_weight"], w["out.norm_bias"], EPS)
        return (normed * torch.sigmoid(v)) @ w["out.weight"].T + w["out.bias"]


class ResidualNorms(nn.Module):
    """RMSNorm(LayerNorm(x)) of the residual stream."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.first, self.second = LayerNorm(WIDTH, EPS, tp=tp), RMSNorm(WIDTH, EPS, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    @staticmethod
    def dense(w: Weights, x: Tensor) -> Tensor:
        y = functional.layer_norm(x, (WIDTH,), w["first.weight"], w["first.bias"], EPS)
        return y / ((y * y).mean(-1, keepdim=True) + EPS).sqrt() * w["second.weight"]


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


LAYERS: dict[str, type[nn.Module]] = {
    "column_row": ColumnRow,
    "biased": BiasedColumnRow,
    "gated_norm": GatedNorm,
    "rmsnorm": RMSNormed,
    "layernorm": LayerNormed,
    "residual_norms": ResidualNorms,
    "low_rank": LowRankRow,
}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_ids() -> Tensor:
    """Ids that include both ends of the vocabulary and of each rank's shard of it."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    ids[0, :9] = torch.tensor([0, VOCAB - 1, 95, 96, 127, 128, 191, 192, 256])
    return ids


def materialise_with_vectors(layer: nn.Module) -> None:
    """Initialises a layer, with random norm weights and biases: ones and zeros could be lost or added twice."""
    materialise(layer)
    for index, (name, parameter) in enumerate(layer.named_parameters()):
        if parameter.dim() == 1 or name.endswith("bias"):
            assign(parameter, draw(10 + index, *parameter.shape))


def _shard(tensor: Tensor, tp: TensorParallel, back: bool = False) -> Tensor:
    """This rank's shard of a full residual stream; with `back`, the full stream from the shards."""
    if not tp.sequence_parallel:
        return tensor
    if back:
        return all_gather(tensor, tp.axis, dim=1)
    return local_slice(tensor, tp.axis, dim=1).contiguous()


def _run_layer(name: str, tp: TensorParallel) -> dict[str, Tensor]:
    layer = LAYERS[name](tp).double()
    materialise_with_vectors(layer)
    x = _shard(draw(1, BATCH, LENGTH, WIDTH), tp).requires_grad_()
    y = layer(x)
    y.backward(_shard(draw(2, BATCH, LENGTH, WIDTH), tp))
    found = {"y": _shard(y.detach(), tp, back=True), "dx": _shard(x.grad, tp, back=True)}
    for weight_name, weight in layer.named_parameters():
        found |= {f"w.{weight_name}": full_tensor(weight.detach()), f"g.{weight_name}": full_tensor(weight.grad)}
    return found


def _run_embedding(tp: TensorParallel) -> dict[str, Tensor]:
    """The embedding as input and as head: logits of tanh(embed(tokens))."""
    embedding = VocabParallelEmbedding(VOCAB, WIDTH, tp=tp, std=0.3).double()
    materialise(embedding)
    rows = embedding.embed(token_ids())
    logits = embedding.logits(rows.tanh())
    local_gradient = local_slice(draw(3, BATCH, LENGTH, 384), tp.axis, dim=2)
    logits.backward(local_gradient)
    return {
        "rows": _shard(rows.detach(), tp, back=True),
        "logits": all_gather(logits.detach(), tp.axis, dim=2),
        "w": full_tensor(embedding.weight.detach()),
        "g": full_tensor(embedding.weight.grad),
    }


def _run(sequence_parallel: bool) -> dict[str, Arrays]:
    tp = make_mesh(torch.distributed.get_world_size(), sequence_parallel=sequence_parallel).tp
    found = {name: to_arrays(_run_layer(name, tp)) for name in LAYERS}
    return found | {"embedding": to_arrays(_run_embedding(tp))}


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
    materialise_with_vectors(one_process)
    weights = {key: weight.detach() for key, weight in one_process.named_parameters()}
    expected = with_gradients(LAYERS[name].dense, weights)
    for arrays in results(world_size, sequence_parallel):
        assert_close(to_tensors(arrays[name]), expected, 1e-12)


@every_mesh
@both_layouts
def test_the_embedding_equals_a_dense_one(world_size: int, sequence_parallel: bool):
    weight = to_tensors(results(world_size, sequence_parallel)[0]["embedding"])["w"].requires_grad_()
    rows = functional.embedding(token_ids(), weight)
    logits = rows.tanh() @ weight.T
    padding = torch.arange(384) >= VOCAB
    logits.backward(draw(3, BATCH, LENGTH, 384).masked_fill(padding, 0.0))
    expected = {"rows": rows, "logits": logits[..., :VOCAB], "w": weight, "g": weight.grad}
    for arrays in results(world_size, sequence_parallel):
        found = to_tensors(arrays["embedding"])
        assert found["logits"][..., VOCAB:].eq(float("-inf")).all()
        assert found["w"][VOCAB:].eq(0).all()
        assert found["w"][:VOCAB].ne(0).all()
        found["logits"] = found["logits"][..., :VOCAB]
        assert_close(found, {name: tensor.detach() for name, tensor in expected.items()}, 1e-12)


@pytest.mark.parametrize("vocab_size", [1, 128, 129, 380])
def test_one_rank_embeds_and_masks_like_many(vocab_size: int):
    embedding = VocabParallelEmbedding(vocab_size, WIDTH, tp=TensorParallel(), std=0.3)
    materialise(embedding)
    rows = -(-vocab_size // 128) * 128
    assert embedding.weight.shape == (rows, WIDTH)
    assert embedding.padded_parameters() == (rows - vocab_size) * WIDTH
    logits = embedding.logits(embedding.embed(torch.tensor([[vocab_size - 1]])))
    assert logits.isfinite().sum() == vocab_size
