"""Values and logits' gradient of vocabulary-parallel cross entropy against torch's."""

from __future__ import annotations

from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalin.parallel import collectives
from megalin.parallel.collectives import Axis, all_gather, all_reduce, local_slice
from megalin.parallel.cross_entropy import (
    _common_choice,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_logits,
)
from tests.numerics import assert_close, relative_error
from tests.parallel.on_ranks import Arrays, make_mesh, to_arrays, to_tensors
from tests.ranks import run_ranks

ROWS, TOKENS = 12, 9
SCALES = {"plain": 1.0, "huge": 1e4, "offset": 1.0}


def make_inputs(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [2, 4, ROWS] whose last rows belong to no token, labels, some ignored, and a weight a loss."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 4, ROWS, generator=generator, dtype=torch.float64) * SCALES[name]
    logits = logits + 1e3 if name == "offset" else logits
    logits[..., TOKENS:] = float("-inf")
    labels = torch.tensor([[0, TOKENS - 1, -100, 3], [2, 5, 6, -100]])
    return logits, labels, torch.randn(2, 4, generator=generator, dtype=torch.float64)


def _losses(name: str, axis: Axis) -> dict[str, Tensor]:
    logits, labels, weights = make_inputs(name)
    mine = local_slice(logits, axis, dim=2).contiguous().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, labels, axis)
    (losses * weights).sum().backward()
    return {f"{name}.losses": losses, f"{name}.gradient": all_gather(mine.grad, axis, dim=2)}


def _run() -> Arrays:
    axis = make_mesh(torch.distributed.get_world_size()).tp.axis
    return to_arrays({key: tensor for name in SCALES for key, tensor in _losses(name, axis).items()})


@lru_cache
def results(world_size: int) -> list[dict[str, Tensor]]:
    if world_size == 1:
        return [{key: tensor for name in SCALES for key, tensor in _losses(name, Axis("tp")).items()}]
    return [to_tensors(arrays) for arrays in run_ranks(world_size, _run)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCALES)
def test_losses_and_gradient_equal_the_dense_ones(name: str, world_size: int):
    """With four ranks the last one holds padding only."""
    logits, labels, weights = make_inputs(name)
    logits.requires_grad_()
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (losses * weights).sum().backward()
    expected = {f"{name}.losses": losses.detach(), f"{name}.gradient": logits.grad}
    for found in results(world_size):
        assert_close({key: found[key] for key in expected}, expected, 1e-13)
        assert found[f"{name}.losses"][labels == -100].eq(0).all()
        assert found[f"{name}.gradient"][labels == -100].eq(0).all()


def test_bf16_logits_give_fp32_losses():
    logits, labels, _ = make_inputs("plain")
    low = logits.bfloat16().requires_grad_()
    losses = vocab_parallel_cross_entropy(low, labels, Axis("tp"))
    losses.sum().backward()
    exact = low.detach().double().requires_grad_()
    truth = vocab_parallel_cross_entropy(exact, labels, Axis("tp"))
    truth.sum().backward()
    assert losses.dtype == torch.float32
    assert low.grad.dtype == torch.bfloat16
    assert relative_error(losses, truth) <= 1e-6
    assert relative_error(low.grad, exact.grad) <= 4e-3


def _head(axis: Axis, backend: str) -> dict[str, Tensor]:
    """Loss and full gradients of a head of ROWS rows, of which TOKENS belong to tokens."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 4, 6), (ROWS, 6)))
    _, labels, weights = make_inputs("plain")
    x.requires_grad_()
    mine = local_slice(weight, axis, dim=0).contiguous().requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(
        x, mine, labels, axis, vocab_size=TOKENS, token_weights=weights.float(), backend=backend
    )
    (loss / 3).backward()
    gradient = all_gather(mine.grad, axis, dim=0)
    return {f"{backend}.loss": loss, f"{backend}.x": all_reduce(x.grad, axis), f"{backend}.weight": gradient}


@patch.object(collectives, "SYNCHRONOUS_DEVICES", frozenset())  # as on a GPU
def _run_head() -> Arrays:
    import tests.interpreter  # noqa: F401

    axis = make_mesh(torch.distributed.get_world_size()).tp.axis
    return to_arrays(_head(axis, "reference") | _head(axis, "triton"))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_fused_head_on_ranks_equals_the_dense_one(world_size: int):
    expected = _head(Axis("tp"), "reference")
    for found in map(to_tensors, run_ranks(world_size, _run_head)):
        for backend in ("reference", "triton"):
            results = {name: found[name.replace("reference", backend)] for name in expected}
            assert_close(results, expected, 2e-6)


def test_without_a_kernel_a_head_is_its_logits_and_their_loss_bit_for_bit():
    x, weight = torch.randn(2, 4, 6), torch.randn(ROWS, 6)
    _, labels, _ = make_inputs("plain")
    logits = vocab_parallel_logits(x, weight, Axis("tp"), vocab_size=TOKENS)
    loss = vocab_parallel_linear_cross_entropy(x, weight, labels, Axis("tp"), vocab_size=TOKENS)
    assert logits[..., TOKENS:].eq(float("-inf")).all()
    assert torch.equal(loss, vocab_parallel_cross_entropy(logits, labels, Axis("tp")).sum())


def _common_choices() -> list[str]:
    """The choices on this rank for a weight of which all, some and no ranks have a kernel."""
    axis = make_mesh(2).tp.axis
    chosen = (("triton", "triton"), ("triton", "reference"), ("reference", "reference"))
    return [
        _common_choice(choices[axis.rank], axis, (rows, 8), torch.float32, torch.device("cpu"))
        for rows, choices in enumerate(chosen)
    ]


def test_ranks_of_an_axis_take_the_reference_where_one_has_no_kernel():
    """Their collectives are others: with a kernel on some ranks alone, all would wait."""
    assert run_ranks(2, _common_choices) == [["triton", "reference", "reference"]] * 2
