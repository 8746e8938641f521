"""Products beside copies of the stream: values and gradients of one process, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.collectives import Axis
from megalin.parallel.overlapped_products import SHORT_PRODUCT, all_gather_matmul, matmul_reduce_scatter
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, to_arrays, to_tensors
from tests.parallel.shared_memory import stream_copies
from tests.ranks import run_ranks

WIDTH, TOKENS = 6, 12


def sample(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(batch: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream, weights up [channels, WIDTH] and down [WIDTH, channels], and the gradient of the result."""
    shapes = ((batch, TOKENS, WIDTH), (channels, WIDTH), (WIDTH, channels), (batch, TOKENS, WIDTH))
    x, up, down, dy = (sample(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return x, up, down / channels**0.5, dy


def layer(x: Tensor, up: Tensor, down: Tensor, axis: Axis | None) -> Tensor:
    """x + down(up(x)^2), twice: an op's memory is written again."""
    for _ in range(2):
        hidden = x @ up.t() if axis is None else all_gather_matmul(x, up, axis)
        hidden = hidden.square()
        x = x + (hidden @ down.t() if axis is None else matmul_reduce_scatter(hidden, down, axis))
    return x


def on_ranks(folder: Path, batch: int, channels: int) -> Arrays:
    group = dist.group.WORLD
    assert group is not None
    axis = Axis("tp", group.size(), group.rank(), group.group_name)
    copies = stream_copies(folder)(torch.device("cpu"), group=group, timeout=None)
    x, up, down, dy = inputs(batch, channels)
    x, dy = (whole.chunk(axis.size, 1)[axis.rank] for whole in (x, dy))
    up, down = up.chunk(axis.size, 0)[axis.rank], down.chunk(axis.size, 1)[axis.rank]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (x, up, down)]
    y = layer(*leaves, axis)
    y.backward(dy)
    del copies
    found = {name: leaf.grad for name, leaf in zip(("dx", "dup", "ddown"), leaves, strict=True)}
    return to_arrays({"y": y, **found})


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("batch", "channels"), [(1, 12), (2, 24), (3, 12), (2, 4 * SHORT_PRODUCT)])
def test_values_and_gradients_are_those_of_one_process(tmp_path, world_size, batch, channels):
    if channels % world_size:
        channels += world_size - channels % world_size
    x, *weights, dy = inputs(batch, channels)
    leaves = [leaf.requires_grad_() for leaf in (x, *weights)]
    y = layer(*leaves, None)
    y.backward(dy)
    expected = {"y": y.detach(), "dx": x.grad, "dup": weights[0].grad, "ddown": weights[1].grad}
    dims = {"y": 1, "dx": 1, "dup": 0, "ddown": 1}
    for rank, found in enumerate(run_ranks(world_size, on_ranks, tmp_path, batch, channels)):
        mine = {name: whole.chunk(world_size, dims[name])[rank] for name, whole in expected.items()}
        assert_close(to_tensors(found), mine, 1e-13)
