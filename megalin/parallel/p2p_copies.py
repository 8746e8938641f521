"""Tensors that go to another GPU of the host by copy engines: no multiprocessor waits for them.

NCCL receives with a kernel that holds multiprocessors until the sender comes, and products beside it take 1.2 to 1.5
times as long (docs/benchmarks/2026-11-22-h200-pipeline.md). Here the sender's copy engine writes the tensor into a slot
of the receiver's memory and sets a signal, for which one warp of the receiver's stream waits when the tensor is needed.
A slot is written again when the receiver has signalled that it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.symmetric_memory import SymmetricMemory, open_symmetric_memory

SLOTS = 2
"""Tensors of a line that may have been sent and not read: one is read while the next one comes."""


class P2PChannels:
    """Lines between the ranks of a group for tensors of one shape. A line is a number at the rank that receives.

    A rank sends on one stream: with three, the gaps between its kernels grew from 1.8 to 3.1 us (H200).
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        rank: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        timeout: timedelta,
        stream: torch.cuda.Stream | None = None,
        buffer: Tensor | None = None,
    ) -> None:
        """
        Args:
            memory: of SLOTS tensors a line on each rank.
            rank: this one, in the group.
            shape, dtype: of what is sent.
            timeout: how long a stream waits for another rank.
            stream: from which this rank sends; None: from the one that computes.
            buffer: this rank's part of the memory, where something must keep it.
        """
        self.memory, self.stream, self._rank, self._buffer = memory, stream, rank, buffer
        self._shape, self._dtype = tuple(shape), dtype
        self.milliseconds = round(timeout.total_seconds() * 1000)

    def sender(self, to: int, line: int) -> Sender:
        """This rank's end of line `line` of rank `to`."""
        return Sender(self, to, line, self._slots(to, line))

    def receiver(self, source: int, line: int) -> Receiver:
        """This rank's end of its line `line`, which rank `source` sends on."""
        return Receiver(self, source, line, self._slots(self._rank, line))

    def _slots(self, rank: int, line: int) -> list[Tensor]:
        size = torch.Size(self._shape).numel()
        starts = (size * (SLOTS * line + slot) for slot in range(SLOTS))
        return [self.memory.get_buffer(rank, self._shape, self._dtype, start) for start in starts]


class _Line:
    """An end of a line: tensors pass the receiver's slots in turn. Slot i of line l has two signals: 2 (SLOTS l + i),
    it is full, and the number after it, it is read."""

    def __init__(self, copies: P2PChannels, peer: int, line: int, slots: Sequence[Tensor]) -> None:
        self._copies, self._peer, self._line, self._slots = copies, peer, line, slots
        self._count = 0

    def _next(self) -> tuple[Tensor, int, bool]:
        """The slot whose turn it is, its first signal, and whether it was used before."""
        turn, index = divmod(self._count, SLOTS)
        self._count += 1
        return self._slots[index], 2 * (SLOTS * self._line + index), turn > 0

    def _wait(self, signal: int) -> None:
        self._copies.memory.wait_signal(self._peer, signal, self._copies.milliseconds)

    def _set(self, signal: int) -> None:
        self._copies.memory.put_signal(self._peer, signal, self._copies.milliseconds)


class Sender(_Line):
    """The end that sends."""

    def send(self, tensor: Tensor) -> None:
        """Sends what the current stream computes; on a GPU neither that stream nor the host waits."""
        stream = self._copies.stream
        if stream is None:
            self._copy(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy(tensor)
        tensor.record_stream(stream)

    def _copy(self, tensor: Tensor) -> None:
        slot, full, used = self._next()
        if used:
            self._wait(full + 1)
        slot.copy_(tensor.detach(), non_blocking=True)
        self._set(full)


class Receiver(_Line):
    """The end that receives."""

    def receive(self, into: Tensor) -> None:
        """Fills a tensor with the next one that was sent; the current stream waits for it."""
        slot, full, _ = self._next()
        self._wait(full)
        into.detach().copy_(slot)
        self._set(full + 1)


def open_channels(
    num_lines: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    group: dist.ProcessGroup,
    timeout: timedelta,
) -> P2PChannels | str:
    """So many lines into each rank of the group; a collective.

    Returns:
        The lines; or, the same on every rank, why there are none.
    """
    numel = SLOTS * num_lines * torch.Size(shape).numel()
    opened = open_symmetric_memory(numel, dtype, device, group, num_signals=2 * SLOTS * num_lines)
    if isinstance(opened, str):
        return opened
    stream = torch.cuda.Stream(device, priority=-1)
    return P2PChannels(opened.memory, group.rank(), shape, dtype, timeout=timeout, stream=stream, buffer=opened.own)
