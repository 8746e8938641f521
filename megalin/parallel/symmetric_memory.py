"""Symmetric memory (torch's): buffers that copy engines of the host's other GPUs write to, and signals."""

from __future__ import annotations

import logging
import socket
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.messages import gather_values

_log = logging.getLogger(__name__)


class SymmetricMemory(Protocol):
    """A buffer and signals on every rank of a group that the other ranks can write, in torch's interface. A signal is
    set or clear, and is identified by a number (`channel`) and the rank that sets it."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int, /) -> Tensor:
        """A view of a rank's buffer, from the element `storage_offset` on."""

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int, /) -> None:
        """Sets a rank's signal, once that rank has cleared the previous one."""

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int, /) -> None:
        """Waits until a rank has set the signal, and clears it."""

    def barrier(self, channel: int, timeout_ms: int, /) -> None:
        """Sets this signal on all other ranks, and waits until all of them have set it here."""


class OpenMemory(NamedTuple):
    """Symmetric memory, and this rank's buffer in it, which must be kept as long."""

    memory: SymmetricMemory
    local_buffer: Tensor


def open_symmetric_memory(
    numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup, *, num_signals: int
) -> OpenMemory | str:
    """Allocates `numel` elements and `num_signals` signals on each rank of the group; a collective.

    Returns:
        The memory; or the reason why there is none, the same on every rank.
    """
    if device.type != "cuda":
        return f"{device.type.upper()} devices have no copy engines"
    hosts = len(set(gather_values(socket.gethostname(), group)))
    if hosts > 1:
        return f"the ranks of the axis are on {hosts} hosts"
    problem, opened = "", None
    try:
        # A prototype in torch: if it fails on one rank, no rank uses it.
        from torch.distributed import _symmetric_memory as symmetric

        local_buffer = symmetric.empty(numel, dtype=dtype, device=device)
        memory = symmetric.rendezvous(local_buffer, group.group_name)
        signals = memory.signal_pad_size // (4 * group.size())
        if signals < num_signals:
            problem = f"torch's symmetric memory has {signals} signals a rank, but {num_signals} are needed"
        opened = OpenMemory(cast(SymmetricMemory, memory), local_buffer)
    except (ImportError, RuntimeError) as error:
        problem = f"torch's symmetric memory fails on rank {group.rank()} of the axis: {error}"
    if problem := next(filter(None, gather_values(problem, group)), ""):
        if group.rank() == 0:
            _log.warning("symmetric memory is not available: %s", problem)
        return problem
    assert opened is not None
    return opened
