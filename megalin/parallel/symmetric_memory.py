"""Memory of other GPUs of the host that a rank's copy engines can write to, and signals (torch's symmetric memory)."""

from __future__ import annotations

import logging
import socket
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.collectives import gather_objects

_log = logging.getLogger(__name__)


class SymmetricMemory(Protocol):
    """A buffer and signals on every rank of a group, which the others can write, as torch's symmetric memory gives. A
    signal is set or not, and has a number and the rank that sets it."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int, /) -> Tensor:
        """A part of a rank's buffer, from an element on."""

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int, /) -> None:
        """Sets a rank's signal, when it has taken the one before."""

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int, /) -> None:
        """Waits until a rank has set the signal, and takes it."""

    def barrier(self, channel: int, timeout_ms: int, /) -> None:
        """Sets all other ranks' signal of this number, and waits until they have set this one's."""


class OpenMemory(NamedTuple):
    """Memory, and this rank's part of it, which must be kept as long."""

    memory: SymmetricMemory
    own: Tensor


def open_symmetric_memory(
    numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, *, num_signals: int
) -> OpenMemory | str:
    """So many elements and signals on each rank of the group; a collective.

    Returns:
        The memory; or, the same on every rank, why there is none.
    """
    if device.type != "cuda":
        return f"a {device.type.upper()} has no copy engines"
    hosts = len(set(gather_objects(socket.gethostname(), group)))
    if hosts > 1:
        return f"the ranks of the axis are on {hosts} hosts"
    problem, opened = "", None
    try:
        # A prototype in torch: where it fails on one rank, all do without.
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(numel, dtype=dtype, device=device)
        memory = symmetric.rendezvous(own, group.group_name)
        signals = memory.signal_pad_size // (4 * group.size())
        if signals < num_signals:
            problem = f"torch's symmetric memory has {signals} signals a rank, and {num_signals} are needed"
        opened = OpenMemory(cast(SymmetricMemory, memory), own)
    except (ImportError, RuntimeError) as error:
        problem = f"torch's symmetric memory fails on rank {group.rank()} of the axis: {error}"
    if problem := next(filter(None, gather_objects(problem, group)), ""):
        if group.rank() == 0:
            _log.warning("no copies into other GPUs' memory: %s", problem)
        return problem
    assert opened is not None
    return opened
