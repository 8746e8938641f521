"""Comparison of the copies of weights, moments and constants that several ranks hold: one that drifts ends the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from megalin.errors import ReplicaError
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.collectives import Axis, all_reduce, axis_of
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import local
from megalin.train.step import AsyncScalars

_PERIOD = 1 << 15
"""Words after which the factors of a checksum repeat: a block whose products stay in a core's cache."""
_BLOCKS_AT_A_TIME = {"cpu": 1, "cuda": 256}
"""Blocks that are multiplied at a time; on a GPU temporary memory of 64 MiB."""
_ABSENT = torch.iinfo(torch.int64).min
"""Neutral element of the maximum, for a tensor that this rank does not hold."""
_MOST_NAMED = 8


class _Copies(NamedTuple):
    """The tensors that the ranks of an axis hold copies of."""

    axis: Axis
    ranks: list[int]
    names: list[str]
    """Equal on these ranks; in a pipeline not each rank holds each."""


_Seen = dict[str, tuple[list[int], dict[str, int]]]
"""Report of a rank: by axis, the axis's ranks and the checksums that differ."""


class ReplicaCheck:
    """Compares the copies of tensors over the ranks that hold them, by checksums.

    Copies of distributed tensors are on the replicate axis (`parallel.shard`, ZeRO 0), on the tensor-parallel axis
    where it does not divide a tensor (norms, biases, gates), and on the pipeline axis where stages share a weight.
    Other tensors are constants, of which every rank of the data axis holds a copy, and those of the tensor-parallel
    axis too where they have no dimension: the others are of a rank's own heads or rows. A wrong constant changes the
    gradients of all ranks, and so all their weights alike. Each rank's shard has the checksum

        sum_i (2 (i mod 2^15) + 1) w_i  mod 2^64,

    w_i its i-th eight bytes as an integer, zeros after the last element. The factors are odd, so a single flipped bit
    always changes it; the sum has no order, so equal shards have equal sums on every device. One all-reduce an axis of
    16 bytes a tensor.
    """

    def __init__(self, mesh: Mesh, tensors: Mapping[str, Tensor]) -> None:
        """Finds the copies; a message of all ranks if the mesh has a pipeline.

        Args:
            tensors: distributed ones of a checkpoint, and constants, by global name (`Engine.replicas`).
        """
        self._mesh = mesh
        replicate = mesh.data_mesh.get_group("replicate")
        constants = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
        of_axes = [
            (axis_of("replicate", replicate), replicate, [name for name in tensors if name not in constants]),
            (mesh.data, mesh.data_group, constants),
            (mesh.tp.axis, mesh.tp_group, [name for name, tensor in tensors.items() if not _has_tp(tensor)]),
            (mesh.pp.axis, mesh.pp.group, _of_several_stages(mesh, tensors)),
        ]
        self._copies = [
            _Copies(axis, dist.get_process_group_ranks(group), names)
            for axis, group, names in of_axes
            if axis.size > 1 and names
        ]
        self._factors = _odd_factors(mesh.device) if self._copies else None

    @torch.no_grad()
    def start(self, tensors: Mapping[str, Tensor], step: int) -> PendingComparison | None:
        """Launches the comparison of the copies after `step`; None where there are no copies. Collectives, for which
        the host does not wait."""
        if not self._copies:
            return None
        needed = {name for copies in self._copies for name in copies.names if name in tensors}
        absent = torch.full((), _ABSENT, device=self._mesh.device)
        sums = {name: self._checksum(local(tensors[name])) for name in sorted(needed)}
        differ: list[Tensor] = []
        for copies in self._copies:
            own = torch.stack([sums.get(name, absent) for name in copies.names])
            # The complement turns the order round: the largest one is that of the smallest sum.
            complement = torch.stack([~sums[name] if name in sums else absent for name in copies.names])
            largest, of_smallest = all_reduce(torch.stack([own, complement]), copies.axis, operation="max").unbind()
            differ.append(largest != ~of_smallest)
        found = self._mesh.is_true_anywhere(torch.cat(differ).any())
        return PendingComparison(step, self._copies, sums, differ, found)

    def _checksum(self, shard: Tensor) -> Tensor:
        """Checksum [] int64 of a tensor's bits."""
        assert self._factors is not None
        words = _words(shard)
        whole = len(words) // _PERIOD * _PERIOD
        blocks = words[:whole].view(-1, _PERIOD).split(_BLOCKS_AT_A_TIME[words.device.type])
        parts = [(block * self._factors).sum() for block in blocks if len(block)]
        parts.append((words[whole:] * self._factors[: len(words) - whole]).sum())
        return torch.stack(parts).sum()


class PendingComparison:
    """A launched comparison, whose result may still be on the device."""

    def __init__(
        self, step: int, copies: Sequence[_Copies], sums: Mapping[str, Tensor], differ: Sequence[Tensor], found: Tensor
    ) -> None:
        self._step, self._copies, self._sums, self._differ = step, copies, sums, differ
        self._found = AsyncScalars(found)

    def wait(self) -> None:
        """Waits for the result. A collective if copies differ.

        Raises:
            ReplicaError: on every rank, if copies differ on any; names the tensors and ranks.
        """
        if self._found.read():
            seen = on_every_rank(self._seen)
            raise ReplicaError(_describe(self._step, seen))

    def _seen(self) -> _Seen:
        return {
            copies.axis.name: (
                copies.ranks,
                {
                    name: int(self._sums[name])
                    for name, differs in zip(copies.names, different.tolist(), strict=True)
                    if differs and name in self._sums
                },
            )
            for copies, different in zip(self._copies, self._differ, strict=True)
        }


def _odd_factors(device: torch.device) -> Tensor:
    """Factors [2^15] int64 of the words of a period."""
    return 2 * torch.arange(_PERIOD, device=device) + 1


def _words(shard: Tensor) -> Tensor:
    """Bits as int64 [ceil(bytes / 8)]; a view where `shard` is contiguous and fills whole words."""
    flat, per_word = shard.contiguous().flatten(), 8 // shard.element_size()
    missing = -len(flat) % per_word
    if missing or flat.storage_offset() % per_word:
        flat = functional.pad(flat, (0, missing))
    return flat.view(torch.int64)


def distributed_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that are distributed."""
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def _has_tp(tensor: Tensor) -> bool:
    """Whether the tensor-parallel axis divides it; FSDP leaves other tensors on the data axes alone."""
    if not isinstance(tensor, DTensor):
        return tensor.dim() > 0
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, tensor.device_mesh
    return any(name == "tp" and not place.is_replicate() for name, place in zip(names, tensor.placements, strict=True))


def _of_several_stages(mesh: Mesh, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names that several ranks of this rank's pipeline hold, in the same order on each."""
    if mesh.pp.size == 1:
        return []
    assert mesh.pp.group is not None
    names = on_every_rank(lambda: sorted(tensors))
    holders = Counter(name for rank in dist.get_process_group_ranks(mesh.pp.group) for name in names[rank])
    return sorted(name for name, count in holders.items() if count > 1)


def _describe(step: int, seen: Sequence[_Seen]) -> str:
    """The message, from the report of every rank."""
    found: defaultdict[str, list[_Shard]] = defaultdict(list)
    for rank, of_axes in enumerate(seen):
        for ranks, different in of_axes.values():
            for name, value in different.items():
                _add(found[name], _Shard({*ranks}, {rank: value}))
    lines = [f"{name}: {_compare(shard.sums)}" for name, shards in sorted(found.items()) for shard in shards]
    if len(lines) > _MOST_NAMED:
        lines = [*lines[:_MOST_NAMED], f"... and {len(lines) - _MOST_NAMED} more"]
    return (
        f"step {step}: copies of a weight, a moment or a constant are no longer equal, although every rank makes the "
        "same update; the memory or the processor of a rank may be faulty.\n"
        + "".join(f"  {line}\n" for line in lines)
        + "Nothing was saved after the newest checkpoint, whose copies were equal: test or replace that host, and "
        "start the same command again"
    )


class _Shard(NamedTuple):
    """Copies of a tensor's shard: the ranks of the axes on which they differ, and the checksums there."""

    ranks: set[int]
    sums: dict[int, int]


def _add(shards: list[_Shard], new: _Shard) -> None:
    """Adds copies to those of the same shard: axes that share a rank."""
    for shard in [each for each in shards if each.ranks & new.ranks]:
        shards.remove(shard)
        new = _Shard(shard.ranks | new.ranks, shard.sums | new.sums)
    shards.append(new)


def _compare(by_rank: Mapping[int, int]) -> str:
    """Names the ranks with other bits than most of the copies, where most agree."""
    sums = dict(sorted(by_rank.items()))
    ((usual, count), *_) = Counter(sums.values()).most_common()
    if 2 * count <= len(sums):
        return f"ranks {_listed(sums)} differ, and no copy has a majority"
    wrong = [rank for rank, value in sums.items() if value != usual]
    return f"rank{'s' * (len(wrong) > 1)} {_listed(wrong)} differ{'s' * (len(wrong) == 1)} from {count} others"


def _listed(ranks: Sequence[int] | Mapping[int, int]) -> str:
    return ", ".join(map(str, ranks))
