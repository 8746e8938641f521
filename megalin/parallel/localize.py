"""Plain local parameters for engines that take no distributed tensors, and what they were slices of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megalin.parallel.collectives import wait_tensor
from megalin.parallel.data_parallel import shard_dim
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local


def localize(model: nn.Module) -> dict[str, Placement]:
    """Replaces each parameter in place by what this rank holds of it, a plain parameter on the same memory.

    A parameter that several modules share stays shared. One that tensor parallelism splits is marked
    `tensor_model_parallel = True`, as Megatron does: engines count a gradient without the mark once for the whole
    tensor-parallel group, so without it they would clip to a norm that misses the other ranks' slices.

    Gradients are made plain too. One that a collective of the backward still brings would be a wrapper, into whose
    place an engine may write its reduced gradient without effect: each rank then steps by its own.

    The model is materialised, on the tensor-parallel mesh alone: what data parallelism has sharded is refused.

    Returns:
        How each parameter lies on the tensor-parallel axis, by its name.
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
    assert len(parameter.placements) == 1, f"{name} lies on {parameter.device_mesh}: make it plain before it is sharded"
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
    """Where the plain tensors of `localize` lie in the whole model, and how to share them out over the data axis.

    A tensor is split over tensor-parallel ranks as its parameter was, and then over the ranks of the data axis, which
    all hold the same: so each keeps a part of its own, that a checkpoint can save, or read from any other mesh's.
    """

    def __init__(self, mesh: Mesh, placements: dict[str, Placement]) -> None:
        self._placements = placements
        # [tp, data]. A copy: of an axis of one rank the transposed view has a stride out of order, which torch 2.11
        # refuses when it gathers over both axes at once.
        ranks = mesh.device_mesh.mesh.flatten(0, 1).T.clone(memory_format=torch.contiguous_format)
        self._mesh = DeviceMesh.from_group(
            [mesh.tp_group, mesh.data_group], mesh.device.type, ranks, mesh_dim_names=("tp", "data")
        )

    def split(self, name: str, tensor: Tensor) -> DTensor:
        """This rank's part of a tensor that lies as the parameter `name` and is whole on each rank of the data axis.
        Nothing is sent. A meta tensor gives the part's shape."""
        placement = self._placements[name]
        whole = DTensor.from_local(tensor, self._mesh, [placement, Replicate()], run_check=False)
        return whole.redistribute(placements=[placement, Shard(shard_dim(tuple(tensor.shape), self._mesh.size(1)))])

    def join(self, name: str, part: Tensor) -> Tensor:
        """The way back: an all-gather over the data axis."""
        assert isinstance(part, DTensor), type(part)
        return part.redistribute(placements=[self._placements[name], Replicate()]).to_local()

    def empty(self, name: str, shape: torch.Size) -> Tensor:
        """Unset memory for such a part in fp32, on the CPU; `shape` is that of the plain parameter."""
        return torch.empty_like(self.split(name, torch.empty(shape, device="meta")), device="cpu")
