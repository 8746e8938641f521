"""Values and adjoints of the conjugate collectives against one process that holds every rank's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from megalin.parallel.collectives import (
    Axis,
    all_gather,
    all_reduce,
    all_to_all_over_axis,
    copy_to_axis,
    gather_from_axis,
    reduce_from_axis,
    reduce_scatter,
    reduce_scatter_to_axis,
)
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, make_mesh, to_arrays, to_tensors
from tests.ranks import run_ranks

SHAPE = (12, 24, 36)
FUNCTIONS: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "copy": copy_to_axis,
    "reduce": reduce_from_axis,
    **{f"gather.{dim}": lambda x, axis, d=dim: gather_from_axis(x, axis, dim=d) for dim in range(3)},
    **{f"scatter.{dim}": lambda x, axis, d=dim: reduce_scatter_to_axis(x, axis, dim=d) for dim in range(3)},
    **{
        f"all_to_all.{split}.{concat}": lambda x, axis, s=split, c=concat: all_to_all_over_axis(
            x, axis, split_dim=s, concat_dim=c
        )
        for split in range(3)
        for concat in range(3)
    },
}
REPLICATED_INPUT = ("copy", "slice")


def draw(name: str, what: str, rank: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, f"{name}{what}")) * 10 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def input_of(name: str, rank: int) -> Tensor:
    return draw(name, "x", 0 if name.startswith(REPLICATED_INPUT) else rank, SHAPE)


def output_gradient(name: str, rank: int, shape: torch.Size) -> Tensor:
    """Gradient of an output; equal on every rank for "reduce", whose replicated output has one loss."""
    return draw(name, "dy", 0 if name == "reduce" else rank, shape)


def _run() -> Arrays:
    axis = make_mesh(torch.distributed.get_world_size()).tp.axis
    found = {}
    for name, function in FUNCTIONS.items():
        # Another dimension is innermost in memory, as a caller's tensor may be.
        x = input_of(name, axis.rank).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        y = function(x, axis)
        y.backward(output_gradient(name, axis.rank, y.shape).transpose(0, 1).contiguous().transpose(0, 1))
        found |= {f"{name}.y": y, f"{name}.dx": x.grad}
    mine = draw("plain", "x", axis.rank, SHAPE)
    found["max"] = all_reduce(mine, axis, operation="max")
    return to_arrays(found)


@lru_cache
def results(world_size: int) -> list[dict[str, Tensor]]:
    return [to_tensors(arrays) for arrays in run_ranks(world_size, _run)]


def truth(name: str, world_size: int) -> list[dict[str, Tensor]]:
    """y and dx of every rank, by autograd through the dense function."""
    kind, dim, *concat = [*name.split("."), ""]
    xs = [input_of(name, rank).requires_grad_() for rank in range(world_size)]
    if name.startswith(REPLICATED_INPUT):
        xs = [xs[0]] * world_size
    total = torch.stack(xs).sum(0)
    ys = {
        "copy": lambda: xs,
        "reduce": lambda: [total] * world_size,
        "gather": lambda: [torch.cat(xs, int(dim))] * world_size,
        "scatter": lambda: total.chunk(world_size, int(dim)),
        "all_to_all": lambda: [
            torch.cat([x.chunk(world_size, int(dim))[rank] for x in xs], int(concat[0])) for rank in range(world_size)
        ],
        "slice": lambda: xs[0].chunk(world_size, int(dim)),
    }[kind]()
    counted = [(output_gradient(name, rank, y.shape) * y).sum() for rank, y in enumerate(ys)]
    (counted[0] if kind == "reduce" else torch.stack(counted).sum()).backward()
    return [{f"{name}.y": y.detach(), f"{name}.dx": x.grad} for x, y in zip(xs, ys, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_adjoints_equal_the_dense_map(name: str, world_size: int):
    for found, expected in zip(results(world_size), truth(name, world_size), strict=True):
        assert_close({key: found[key] for key in expected}, expected, 1e-14)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_maximum_over_the_axis(world_size: int):
    expected = torch.stack([draw("plain", "x", rank, SHAPE) for rank in range(world_size)]).amax(0)
    assert all(torch.equal(found["max"], expected) for found in results(world_size))


def test_an_axis_of_one_needs_no_process_group():
    x, axis = torch.randn(2, 3), Axis("tp")
    assert all(function(x, axis) is x for name, function in FUNCTIONS.items() if not name.endswith("2"))
    assert all_reduce(x, axis) is all_gather(x, axis, dim=0) is reduce_scatter(x, axis, dim=0) is x
