"""Point-to-point transfers between GPUs of one host by copy engines, so that no multiprocessor waits for them.

NCCL receives with a kernel that holds multiprocessors until the sender arrives, and matmuls that overlap with it take
1.2 to 1.5 times as long (docs/benchmarks/2026-11-22-h200-pipeline.md). Here the sender's copy engine writes the tensor
into a slot of the receiver's memory and sets a signal; one warp of the receiver's CUDA stream waits for it when the
tensor is needed. A slot is written again once the receiver has signalled that it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.heartbeats import Heartbeat
from megalin.parallel.symmetric_memory import SymmetricMemory, open_symmetric_memory

SLOTS = 2
"""Tensors of a channel that may be sent and unread: one is read while the next arrives."""


class P2PChannels:
    """Point-to-point channels over symmetric memory, for tensors of one shape. A channel is identified by its index on
    the receiving rank.

    A rank sends on one CUDA stream: with three, the gaps between its kernels grew from 1.8 to 3.1 us (H200).
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        rank: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        launches: Heartbeat,
        *,
        timeout: timedelta,
        cuda_stream: torch.cuda.Stream | None = None,
        buffer: Tensor | None = None,
    ) -> None:
        """
        Args:
            memory: SLOTS tensors a channel on each rank.
            rank: this rank's index in the group.
            shape, dtype: of the tensors.
            launches: records what this rank sends and receives, without a comparison: the ranks of a pipeline differ.
            timeout: longest time that a CUDA stream waits for another rank.
            cuda_stream: the stream that this rank sends on; None: the current one.
            buffer: this rank's buffer of the memory, where something must keep it.
        """
        self.memory, self.cuda_stream, self._rank, self._buffer = memory, cuda_stream, rank, buffer
        self._shape, self._dtype, self._launches = tuple(shape), dtype, launches
        self.milliseconds = round(timeout.total_seconds() * 1000)

    def sender(self, to: int, channel: int) -> Sender:
        """The sending end of channel `channel` of rank `to`."""
        return Sender(self, to, channel, self._slots(to, channel))

    def receiver(self, source: int, channel: int) -> Receiver:
        """The receiving end of this rank's channel `channel`, on which rank `source` sends."""
        return Receiver(self, source, channel, self._slots(self._rank, channel))

    def record(self, op: str) -> None:
        """Records that a tensor is sent or received."""
        self._launches.record(op, "pp", self._shape)

    def _slots(self, rank: int, channel: int) -> list[Tensor]:
        size = torch.Size(self._shape).numel()
        starts = (size * (SLOTS * channel + slot) for slot in range(SLOTS))
        return [self.memory.get_buffer(rank, self._shape, self._dtype, start) for start in starts]


class _ChannelEnd:
    """One end of a channel. Tensors take the receiver's slots in turn. Slot i of channel c has two signals: number
    2 (SLOTS c + i) when it is full, and the next number when it was read."""

    def __init__(self, channels: P2PChannels, other_rank: int, channel: int, slots: Sequence[Tensor]) -> None:
        self._channels, self._other_rank, self._channel, self._slots = channels, other_rank, channel, slots
        self._count = 0

    def _next(self) -> tuple[Tensor, int, bool]:
        """The next slot, its first signal, and whether the slot was used before."""
        turn, index = divmod(self._count, SLOTS)
        self._count += 1
        return self._slots[index], 2 * (SLOTS * self._channel + index), turn > 0

    def _wait(self, signal: int) -> None:
        self._channels.memory.wait_signal(self._other_rank, signal, self._channels.milliseconds)

    def _set(self, signal: int) -> None:
        self._channels.memory.put_signal(self._other_rank, signal, self._channels.milliseconds)


class Sender(_ChannelEnd):
    """The sending end of a channel."""

    def send(self, tensor: Tensor) -> None:
        """Sends `tensor` after the current CUDA stream's work; on a GPU neither that stream nor the host waits."""
        self._channels.record(f"send to rank {self._other_rank}, channel {self._channel}")
        cuda_stream = self._channels.cuda_stream
        if cuda_stream is None:
            self._copy(tensor)
            return
        cuda_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(cuda_stream):
            self._copy(tensor)
        tensor.record_stream(cuda_stream)

    def _copy(self, tensor: Tensor) -> None:
        slot, full, used = self._next()
        if used:
            self._wait(full + 1)
        slot.copy_(tensor.detach(), non_blocking=True)
        self._set(full)


class Receiver(_ChannelEnd):
    """The receiving end of a channel."""

    def receive(self, into: Tensor) -> None:
        """Fills `into` with the next tensor sent; the current CUDA stream waits for it."""
        self._channels.record(f"receive from rank {self._other_rank}, channel {self._channel}")
        slot, full, _ = self._next()
        self._wait(full)
        into.detach().copy_(slot)
        self._set(full + 1)


def open_channels(
    num_channels: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    group: dist.ProcessGroup,
    timeout: timedelta,
    launches: Heartbeat,
) -> P2PChannels | str:
    """Opens `num_channels` channels into each rank of the group; a collective.

    Returns:
        The channels; or the reason why there are none, the same on every rank.
    """
    numel = SLOTS * num_channels * torch.Size(shape).numel()
    opened = open_symmetric_memory(numel, dtype, device, group, num_signals=2 * SLOTS * num_channels)
    if isinstance(opened, str):
        return opened
    memory, buffer = opened
    cuda_stream = torch.cuda.Stream(device, priority=-1)
    return P2PChannels(
        memory, group.rank(), shape, dtype, launches, timeout=timeout, cuda_stream=cuda_stream, buffer=buffer
    )
