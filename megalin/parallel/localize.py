"""Plain local parameters for engines that do not support DTensor, and their place in the full parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megalin.parallel.collectives import wait_tensor
from megalin.parallel.mesh import Mesh
from megalin.parallel.shard_dim import shard_dim
from megalin.parallel.tensor_parallel import local


def localize(model: nn.Module) -> dict[str, Placement]:
    """Replaces each parameter in place by this rank's shard, a plain parameter on the same memory.

    A parameter that several modules share stays shared. One that is sharded by tensor parallelism is marked
    `tensor_model_parallel = True`, as in Megatron: engines count a gradient without the mark once for the whole
    tensor-parallel group, so without it they would clip to a norm that misses the other ranks' shards.

    Gradients are made plain too. The pending result of a collective would be a wrapper: the reduced gradient that an
    engine writes to it has no effect, and each rank would step by its own.

    The model is materialised, on the tensor-parallel mesh alone: parameters sharded by data parallelism are refused.

    Returns:
        The placement of each parameter on the tensor-parallel axis, by name.
    """
    placements = {name: _placement(name, parameter) for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    plain: dict[str, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            name = names[id(parameter)]
            if name not in plain:
                plain[name] = _plain(parameter)
            setattr(module, key, plain[name])
    return placements


def _placement(name: str, parameter: nn.Parameter) -> Placement:
    if not isinstance(parameter, DTensor):
        return Replicate()
    assert len(parameter.placements) == 1, f"{name} is on {parameter.device_mesh}: localize before data parallelism"
    (placement,) = parameter.placements
    assert placement.is_replicate() or placement.is_shard(), f"{name} is {placement}"
    return placement


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    plain = nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)
    if isinstance(parameter, DTensor) and parameter.placements[0].is_shard() and parameter.device_mesh.size() > 1:
        plain.tensor_model_parallel = True  # type: ignore[attr-defined]
    if plain.requires_grad:
        plain.register_hook(wait_tensor)
    return plain


class LocalLayout:
    """Sharding of the plain tensors of `localize` over the tensor-parallel and the data axis.

    A tensor is sharded over the tensor-parallel axis as its parameter was, and then over the data axis, whose ranks all
    hold the same values: so each rank keeps a shard of its own, for checkpoints that load on any mesh.
    """

    def __init__(self, mesh: Mesh, placements: dict[str, Placement]) -> None:
        self._placements = placements
        # [tp, data]. A copy: with an axis of one rank the transposed view has a stride out of order, which torch 2.11
        # refuses when it gathers over both axes at once.
        ranks = mesh.device_mesh.mesh.flatten(0, 1).T.clone(memory_format=torch.contiguous_format)
        self._mesh = DeviceMesh.from_group(
            [mesh.tp_group, mesh.data_group], mesh.device.type, ranks, mesh_dim_names=("tp", "data")
        )

    def split(self, name: str, tensor: Tensor) -> DTensor:
        """This rank's shard of a tensor of the parameter `name` that is equal on all ranks of the data axis. Nothing is
        sent. A meta tensor gives the shard's shape."""
        placement = self._placements[name]
        replicated = DTensor.from_local(tensor, self._mesh, [placement, Replicate()], run_check=False)
        dim = shard_dim(tuple(tensor.shape), self._mesh.size(1))
        return replicated.redistribute(placements=[placement, Shard(dim)])

    def join(self, name: str, shard: Tensor) -> Tensor:
        """Inverse of `split`: an all-gather over the data axis."""
        assert isinstance(shard, DTensor), type(shard)
        return shard.redistribute(placements=[self._placements[name], Replicate()]).to_local()

    def empty(self, name: str, shape: torch.Size) -> Tensor:
        """Uninitialised memory for such a shard in fp32, on the CPU; `shape` is that of the plain parameter."""
        return torch.empty_like(self.split(name, torch.empty(shape, device="meta")), device="cpu")
