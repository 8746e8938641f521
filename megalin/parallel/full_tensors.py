"""Full weights and gradients from their shards, many in each collective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalin.parallel.collectives import all_gather, axis_of
from megalin.parallel.tensor_parallel import full_tensor, is_dtensor, local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_MOST_ELEMENTS = 2**24
"""Most elements of the full tensors that are gathered together, unless one tensor has more."""


@torch.no_grad()
def full_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The full parameters or gradients by name, in their order, on every rank: `full_tensor` of each without autograd,
    but with one all-gather a mesh axis for many tensors. Plain tensors are returned as they are. A collective.
    """
    names: list[str] = []
    kind, elements = None, 0
    for name, tensor in tensors.items():
        own = _kind(tensor)
        if names and (own is None or own != kind or elements + tensor.numel() > _MOST_ELEMENTS):
            yield from _gathered(names, tensors, kind)
            names, elements = [], 0
        names.append(name)
        kind, elements = own, elements + tensor.numel()
    yield from _gathered(names, tensors, kind)


def _kind(tensor: Tensor) -> Any:
    """Equal for tensors that are gathered together; None for one that is taken alone."""
    return (tensor.device_mesh, tensor.dtype) if is_dtensor(tensor) and _is_split_in_order(tensor) else None


def _is_split_in_order(tensor: DTensor) -> bool:
    """Whether gathering one mesh axis after the other, the first one first, makes the tensor full: each axis shards a
    dimension, or none, and a dimension that several axes shard is split by the last of them first, as FSDP splits the
    shards of tensor parallelism."""
    dims: dict[int, int] = {}  # number of shards by the axes after this one
    for axis in reversed(range(tensor.device_mesh.ndim)):
        placement, size = tensor.placements[axis], tensor.device_mesh.size(axis)
        if size == 1 or placement.is_replicate():
            continue
        dim = _dim(placement)
        if dim is None or dims.get(dim, 1) != getattr(placement, "split_factor", 1):
            return False
        dims[dim] = dims.get(dim, 1) * size
    return True


def _gathered(names: Sequence[str], tensors: Mapping[str, Tensor], kind: Any) -> Iterator[tuple[str, Tensor]]:
    if kind is None:
        yield from ((name, full_tensor(tensors[name])) for name in names)
    else:
        yield from zip(names, _join([tensors[name] for name in names]), strict=True)


def _join(tensors: Sequence[Any]) -> list[Tensor]:
    """The full tensors of one mesh and dtype."""
    mesh, parts = tensors[0].device_mesh, [local(tensor) for tensor in tensors]
    for axis in range(mesh.ndim):
        size = mesh.size(axis)
        split = [n for n, tensor in enumerate(tensors) if size > 1 and not tensor.placements[axis].is_replicate()]
        if not split:
            continue
        dims = [tensors[n].placements[axis].dim for n in split]
        lengths = [_length(tensors[n], axis) for n in split]
        # Each rank but the last ones has as many elements along the dimension as the first.
        padded = [_pad(parts[n], dim, -(-length // size)) for n, dim, length in zip(split, dims, lengths, strict=True)]
        buffer = torch.cat([part.flatten() for part in padded])
        gathered = all_gather(buffer[None], axis_of("mesh", mesh.get_group(axis)), dim=0)
        of_parts = gathered.split([part.numel() for part in padded], 1)
        for n, dim, length, part, of_ranks in zip(split, dims, lengths, padded, of_parts, strict=True):
            parts[n] = torch.cat(of_ranks.unflatten(1, part.shape).unbind(), dim).narrow(dim, 0, length).contiguous()
    return parts


def _length(tensor: DTensor, axis: int) -> int:
    """Length, once this axis and those before it are gathered, of the dimension that the axis shards."""
    dim = _dim(tensor.placements[axis])
    assert dim is not None, tensor.placements
    later = [n for n in range(axis + 1, tensor.device_mesh.ndim) if _dim(tensor.placements[n]) == dim]
    return tensor.shape[dim] // math.prod(tensor.device_mesh.size(n) for n in later)


def _dim(placement: Placement) -> int | None:
    """The dimension that an axis shards; None if it shards none."""
    return getattr(placement, "dim", None)


def _pad(part: Tensor, dim: int, length: int) -> Tensor:
    """`part` with zeros after its end along `dim`, so that it has this length."""
    if part.shape[dim] == length:
        return part
    shape = list(part.shape)
    shape[dim] = length - part.shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)
