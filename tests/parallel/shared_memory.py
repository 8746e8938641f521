"""Stand-in for torch's symmetric memory on CPU ranks: files that all of them map."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.async_tensor_parallel import AsyncTPBuffers
from megalin.parallel.heartbeats import Heartbeat
from megalin.parallel.launch_order import LaunchOrder
from megalin.parallel.symmetric_memory import OpenMemory

NUM_SIGNALS = 64


class SharedMemory:
    """Symmetric memory of `numel` elements and the signals of every rank, in files of a folder."""

    def __init__(self, folder: Path, rank: int, world_size: int, numel: int, dtype: torch.dtype) -> None:
        def mapped(name: str, count: int, dtype: torch.dtype) -> Tensor:
            return torch.from_file(str(folder / name), shared=True, size=count, dtype=dtype)

        self._rank, self._world_size = rank, world_size
        self._data = mapped("data", world_size * numel, dtype).view(world_size, numel)
        count = world_size * NUM_SIGNALS * world_size
        self._signals = mapped("signals", count, torch.int32).view(world_size, NUM_SIGNALS, world_size)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor:
        assert dtype == self._data.dtype
        return self._data[rank, storage_offset : storage_offset + torch.Size(sizes).numel()].view(sizes)

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None:
        self._change(self._signals[dst_rank, channel, self._rank], 0, 1, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None:
        self._change(self._signals[self._rank, channel, src_rank], 1, 0, timeout_ms)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        for rank in others:
            self.put_signal(rank, channel, timeout_ms)
        for rank in others:
            self.wait_signal(rank, channel, timeout_ms)

    @staticmethod
    def _change(signal: Tensor, old: int, new: int, timeout_ms: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1000
        while signal.item() != old:
            if time.monotonic() > deadline:
                raise RuntimeError("launch failure: a signal did not change in time")
            time.sleep(1e-4)
        signal.fill_(new)


def buffers_in_files(folder: Path) -> Callable[..., AsyncTPBuffers]:
    """Stand-in for `open_async_tp_buffers` on CPU ranks, with files in a folder that all of them can read."""
    opened = 0

    def open_(
        device: torch.device, *, group: dist.ProcessGroup, timeout: timedelta, launches: Heartbeat
    ) -> AsyncTPBuffers:
        assert device.type == "cpu"
        ranks = dist.get_process_group_ranks(group)

        def open_memory(numel: int, dtype: torch.dtype) -> OpenMemory:
            nonlocal opened
            here = folder / f"{'-'.join(map(str, ranks))}.{opened}"
            opened += 1
            if group.rank() == 0:
                here.mkdir(parents=True)
            dist.barrier(group)
            memory = SharedMemory(here, group.rank(), group.size(), numel, dtype)
            return OpenMemory(memory, torch.empty(0))

        name, rank, size, limit = group.group_name, group.rank(), group.size(), timedelta(seconds=20)
        order = LaunchOrder(launches, "tp", group, timeout=limit)
        return AsyncTPBuffers(name, rank, size, open_memory, order, timeout=limit)

    return open_


class _WithoutWaits:
    """Symmetric memory of one rank, whose signals nothing waits for: the view of a GPU's host, which only launches."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._data = torch.zeros(numel, dtype=dtype)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor:
        return self._data[storage_offset : storage_offset + torch.Size(sizes).numel()].view(sizes)

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None:
        pass

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None:
        pass

    def barrier(self, channel: int, timeout_ms: int) -> None:
        pass


def buffers_without_waits(
    device: torch.device, *, group: dist.ProcessGroup, timeout: timedelta, launches: Heartbeat
) -> AsyncTPBuffers:
    """Stand-in for `open_async_tp_buffers` on CPU ranks: ops launch without waiting, and their results are wrong."""
    assert device.type == "cpu"

    def open_memory(numel: int, dtype: torch.dtype) -> OpenMemory:
        return OpenMemory(_WithoutWaits(numel, dtype), torch.empty(0))

    order = LaunchOrder(launches, "tp", group, timeout=timeout)
    return AsyncTPBuffers(group.group_name, group.rank(), group.size(), open_memory, order, timeout=timeout)
