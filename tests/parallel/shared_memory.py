"""A stand-in for torch's symmetric memory on CPU ranks: a file that all of them map."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

NUM_SIGNALS = 64


class SharedMemory:
    """`numel` elements and signals of every rank, in files of a folder."""

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

    @staticmethod
    def _change(signal: Tensor, old: int, new: int, timeout_ms: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1000
        while signal.item() != old:
            if time.monotonic() > deadline:
                raise RuntimeError("launch failure: a signal did not change in time")
            time.sleep(1e-4)
        signal.fill_(new)
