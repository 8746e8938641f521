"""Plain parameters of `localize`: marks, gradients, shared parameters, and conversion for checkpoints and back."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import DTensor

from megalin.model.language_model import LanguageModel
from megalin.parallel import collectives
from megalin.parallel.data_parallel import shard_model
from megalin.parallel.localize import LocalLayout, localize
from tests.cases import HYBRID, make_inputs
from tests.parallel.on_ranks import make_mesh, materialise
from tests.ranks import run_ranks


def _plain_model() -> None:
    mesh = make_mesh(2)
    model, full = LanguageModel(HYBRID.model, mesh.tp), LanguageModel(HYBRID.model)
    materialise(model)
    materialise(full)
    sliced = {name for name, p in model.named_parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()}
    placements = localize(model)
    parameters = dict(model.named_parameters())
    assert not any(isinstance(parameter, DTensor) for parameter in parameters.values())
    assert {name for name, p in parameters.items() if getattr(p, "tensor_model_parallel", False)} == sliced
    layout = LocalLayout(mesh, placements)
    truth = dict(full.named_parameters())
    for name, parameter in parameters.items():
        part = layout.split(name, parameter.detach())
        assert torch.equal(part.full_tensor(), truth[name]), name
        assert torch.equal(layout.join(name, part), parameter), name
        empty = layout.empty(name, parameter.shape)
        assert isinstance(empty, DTensor)
        assert (empty.placements, empty.to_local().shape) == (part.placements, part.to_local().shape)
    tokens, labels, _ = make_inputs()
    rows = slice(2 * mesh.data.rank, 2 * mesh.data.rank + 2)
    model(tokens[rows], labels=labels[rows]).token_losses.sum().backward()
    assert {type(parameter.grad) for parameter in parameters.values()} == {torch.Tensor}


@pytest.mark.parametrize("world_size", [2, 4, 6])  # 3 data ranks do not divide every weight
def test_parameters_are_marked_slices_that_a_checkpoint_can_join(world_size):
    run_ranks(world_size, _plain_model)


def _shared() -> None:
    mesh = make_mesh(2)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    first.weight = second.weight = mesh.tp.parameter(4, 4, shard_dim=0)
    model = nn.Sequential(first, second)
    assert list(localize(model)) == ["0.weight", "0.bias", "1.bias"]
    assert first.weight is second.weight
    assert first.weight.shape == (2, 4)
    # Gradients whose collective is unfinished when they are accumulated: one passed in, and one of a backward.
    grad = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert isinstance(grad, functional.AsyncCollectiveTensor)
    first.bias.backward(grad)
    with patch.object(collectives, "SYNCHRONOUS_DEVICES", frozenset()):  # as on a GPU
        mesh.tp.all_reduce_gradient(second.bias).sum().backward()
    for bias in (first.bias, second.bias):
        assert type(bias.grad) is torch.Tensor
        assert bias.grad.tolist() == [2.0] * 4


def test_shared_parameters_stay_shared_and_gradients_have_arrived():
    run_ranks(2, _shared)


def _sharded() -> None:
    mesh = make_mesh(1)
    model = LanguageModel(HYBRID.model, mesh.tp)
    shard_model(
        model, list(model.blocks), model.full_precision_modules(), mesh, compute_dtype=torch.float32, head=model.head
    )
    with pytest.raises(AssertionError, match=r"embedding.weight is on .*localize before data parallelism"):
        localize(model)


def test_what_data_parallelism_has_sharded_is_refused():
    run_ranks(2, _sharded)
