"""Copy of a checkpoint's tensors in host memory, laid out as its files, from which a thread writes them later."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megalin.checkpoint import storage
from megalin.checkpoint.index import Index
from megalin.checkpoint.manifest import FileRecord
from megalin.checkpoint.storage import FILE_BYTES, PlannedFile, SafetensorsWriter
from megalin.errors import HostMemoryError

_ALIGNMENT = 64
_WRITE_BYTES = 16 << 20
"""Bytes that are hashed and written at a time; between two such parts the thread reports progress."""


class HostBuffer:
    """Host memory that is reused between saves; page-locked where a GPU copies into it.

    It is locked in place: torch's allocator of page-locked memory would round its size up to a power of two.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._is_locked = False
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, num_bytes: int, *, locked: bool) -> Tensor:
        """[num_bytes] uint8; the contents are those of the call before, or undefined.

        Raises:
            HostMemoryError: the host does not have as much memory left, or CUDA cannot lock it.
        """
        if self._memory is None or self._memory.numel() != num_bytes:
            self.close()
            _check_available(num_bytes)
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if locked and not self._is_locked and num_bytes:
            # 1: cudaHostRegisterPortable
            code = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 1))
            if code:
                raise HostMemoryError(
                    f"checkpoint.background needs {num_bytes / 2**30:.2f} GiB of page-locked host memory, which CUDA "
                    f"refuses (error {code}); set checkpoint.background = false, or allow the process to lock memory"
                )
            self._is_locked = True
        return self._memory

    def cuda_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The CUDA stream of the copies."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def close(self) -> None:
        """Frees the memory, which nothing may read or write any more."""
        if self._memory is not None and self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._is_locked = None, False


def _check_available(num_bytes: int) -> None:
    """Raises HostMemoryError where these bytes on each rank of this host would make the kernel kill a process."""
    ranks, available = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available_bytes()
    if available is not None and ranks * num_bytes > available:
        raise HostMemoryError(
            f"checkpoint.background needs {num_bytes / 2**30:.2f} GiB of host memory for the copy of a rank's state, "
            f"and {available / 2**30:.2f} GiB are left for the {ranks} rank(s) of this host; set "
            "checkpoint.background = false, or use more hosts"
        )


def available_bytes() -> int | None:
    """Host memory that can be allocated without swapping; None where the kernel does not report it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


class _CopiedFile(NamedTuple):
    name: str
    header: bytes
    data: Tensor  # uint8, a view of the buffer


class SnapshotWriter(SafetensorsWriter):
    """Copies this rank's planned boxes to host memory in place of writing them; `write` writes them.

    The files have the same bytes as those of SafetensorsWriter.

    Attributes:
        copied: recorded on the GPU after the copy; None: the copy is complete.
        index: on rank 0, content of index.json.
    """

    def __init__(self, directory: Path, buffer: HostBuffer, *, file_bytes: int = FILE_BYTES) -> None:
        super().__init__(directory, lambda files: None, file_bytes=file_bytes)
        self._buffer = buffer
        self._files: list[_CopiedFile] = []
        self._sources: list[Tensor] = []
        self._device: torch.device | None = None
        self.copied: torch.cuda.Event | None = None
        self.index: Index | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Launches the copy of this rank's boxes."""
        files = self.planned_files(plan)
        self._sources = [storage.piece_tensor(planner, piece) for file in files for piece in file.pieces]
        self._device = device = next((source.device for source in self._sources if source.is_cuda), None)
        sizes = [sum(storage.num_bytes(piece) for piece in file.pieces) for file in files]
        starts = [0, *itertools.accumulate(size + -size % _ALIGNMENT for size in sizes)]
        memory = self._buffer.reserve(starts[-1], locked=device is not None)
        targets = [memory[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]
        self._files = [_CopiedFile(file.name, file.header, data) for file, data in zip(files, targets, strict=True)]
        boxes = itertools.chain.from_iterable(itertools.starmap(_boxes, zip(files, targets, strict=True)))
        if device is None:
            _copy(self._sources, boxes)
        else:
            stream = self._buffer.cuda_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                _copy(self._sources, boxes)
            self.copied = torch.cuda.Event(blocking=True)  # the thread that waits must not take a core
            self.copied.record(stream)
        return storage.done([result for file in files for result in storage.write_results(file, None)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: stores the index."""
        self.index = storage.index_of(metadata, results)

    def write(self, beat: Callable[[], None]) -> dict[str, FileRecord]:
        """Waits for the copy, then writes, hashes and syncs this rank's files; returns their records by name.

        Args:
            beat: called after each part.

        Raises:
            OSError: a file cannot be written.
        """
        if self.copied is not None:
            torch.cuda.set_device(self._device)  # else this thread opens a context on the first GPU
            self.copied.synchronize()
        self._sources = []  # memory of the copy's sources must not be reused before
        beat()
        return {file.name: storage.write_file(self.directory / file.name, _parts(file, beat)) for file in self._files}


def _boxes(file: PlannedFile, data: Tensor) -> Iterator[Tensor]:
    """The places of a file's pieces in its data, each with the dtype and shape of its piece."""
    position = 0
    for piece in file.pieces:
        end = position + storage.num_bytes(piece)
        yield data[position:end].view(storage.dtype_of(piece)).view(piece.lengths)
        position = end


def _copy(sources: list[Tensor], targets: Iterator[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _parts(file: _CopiedFile, beat: Callable[[], None]) -> Iterator[Any]:
    yield file.header
    data = storage.array_of(file.data)
    for start in range(0, len(data), _WRITE_BYTES):
        yield data[start : start + _WRITE_BYTES]
        beat()
