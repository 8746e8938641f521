"""Gathers of many sharded tensors at once against torch's gather of each."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megalin.parallel import full_tensors as module
from megalin.parallel.config import ParallelConfig
from megalin.parallel.full_tensors import full_tensors
from megalin.parallel.mesh import Mesh
from megalin.parallel.shard_dim import shard_dim
from megalin.parallel.tensor_parallel import assign, local
from tests.model_runs import CPU
from tests.ranks import run_ranks

SHAPES = [
    ((8,), None),
    ((8,), 0),
    ((6, 5), 0),
    ((5, 6), 1),
    ((3, 4, 6), 1),
    ((7, 3), None),
    ((1,), None),
    ((4, 2, 2), 2),
]
"""Shapes and the dimension that tensor parallelism shards: FSDP shards some of them along the same one, some unevenly,
some not at all."""


def _weights(mesh: Mesh) -> dict[str, Tensor]:
    layer = nn.Module()
    for number, (shape, dim) in enumerate(SHAPES):
        layer.register_parameter(f"weight{number}", mesh.tp.parameter(*shape, shard_dim=dim))
    size = mesh.data_mesh.size(1)
    fully_shard(layer, mesh=mesh.data_mesh, shard_placement_fn=lambda p: Shard(shard_dim(tuple(local(p).shape), size)))
    layer.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        assign(parameter, torch.randn(parameter.shape, generator=generator))
    return dict(layer.named_parameters())


def _compare(parallel: ParallelConfig) -> list[int]:
    """Compares the results for three limits of a gather; returns the numbers of all-gathers."""
    mesh, counts = Mesh(parallel, CPU), []
    weights = _weights(mesh)
    one = torch.ones(2)
    own = torch.full((2,), float(torch.distributed.get_rank()))
    others = {
        "plain": one,
        "sum": DTensor.from_local(one, mesh.device_mesh, [Replicate(), Partial(), Partial()], run_check=False),
        "double": weights["weight1"].double(),
        "first axis splits first": DTensor.from_local(own, mesh.device_mesh, [Shard(0)] * 3, run_check=False),
    }
    tensors = {"weight0": weights.pop("weight0"), **others, **weights}
    for most_elements in (1, 40, 2**24):
        module._MOST_ELEMENTS = most_elements
        with patch.object(module, "all_gather", wraps=module.all_gather) as gather:
            found = dict(full_tensors(tensors))
        counts.append(gather.call_count)
        assert list(found) == list(tensors)
        for name, tensor in tensors.items():
            expected = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert found[name].is_contiguous(), name
            assert not found[name].requires_grad, name
            torch.testing.assert_close(found[name], expected.detach(), rtol=0, atol=0)
    return counts


@pytest.mark.parametrize(
    ("world_size", "axes", "num_gathers"),
    [
        (1, {}, [0, 0, 0]),
        (2, {}, [10, 7, 3]),
        (2, {"tp": 2}, [7, 6, 2]),
        (6, {"tp": 2}, [15, 11, 5]),
        (4, {"tp": 2, "shard": 1}, [6, 5, 2]),
        (4, {"shard": 2}, [9, 6, 3]),
    ],
)
def test_gathered_tensors_are_those_of_torch(world_size: int, axes: dict[str, int], num_gathers: list[int]) -> None:
    assert run_ranks(world_size, _compare, ParallelConfig(**axes)) == [num_gathers] * world_size
