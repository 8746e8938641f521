"""Storage of torch.distributed.checkpoint: safetensors files of bounded size and an index in JSON.

Torch plans which rank writes which replica, and which saved boxes make up a local shard on another mesh. Nothing here
pickles or unpickles. Files are streamed piece by piece, so a save needs host memory for one piece per rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megalin.checkpoint.index import DTYPE_NAMES, DTYPES, INDEX_FILE, Chunk, Index, TensorRecord, chunk_key
from megalin.checkpoint.manifest import FileRecord
from megalin.errors import CheckpointError
from megalin.files import open_regular, sync, write_new

FILE_BYTES = 1 << 30
"""Largest file of a checkpoint."""

HEADER_LIMIT_BYTES = 100_000_000
"""Largest safetensors header; larger ones are refused unread."""

_HEADER_RESERVE_BYTES = 1 << 24


class TensorPiece(NamedTuple):
    """A box of a write item, small enough for one file."""

    item: WriteItem
    starts: tuple[int, ...]  # within the item
    lengths: tuple[int, ...]


class PlannedFile(NamedTuple):
    """A safetensors file: its header, and the pieces that follow it without gaps."""

    name: str
    header: bytes
    pieces: Sequence[TensorPiece]


class _Stored(NamedTuple):
    chunk: Chunk
    record: FileRecord | None  # None: of a file that is written later


class SafetensorsWriter(StorageWriter):
    """Writes each rank's planned boxes to its own files, then index.json on rank 0; then calls `publish`."""

    def __init__(
        self, directory: Path, publish: Callable[[dict[str, FileRecord]], None], *, file_bytes: int = FILE_BYTES
    ) -> None:
        """`publish` is called on rank 0 with the record of every file, after all files are on the disk."""
        self.directory = directory
        self._publish = publish
        self._payload_bytes = max(file_bytes - _HEADER_RESERVE_BYTES, file_bytes // 2)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: no state is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the directory exists before the save starts."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns torch's plan unchanged."""
        assert all(item.type != WriteItemType.BYTE_IO for item in plan.items), "only tensors are stored"
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assigns each rank a prefix for its files."""
        return [dataclasses.replace(plan, storage_data=f"rank{number:05d}") for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes, hashes and syncs this rank's files. Raises OSError."""
        results = []
        for file in self.planned_files(plan):
            data = (array_of(piece_tensor(planner, piece).to("cpu").contiguous()) for piece in file.pieces)
            record = write_file(self.directory / file.name, itertools.chain([file.header], data))
            results += write_results(file, record)
        return done(results)

    def planned_files(self, plan: SavePlan) -> list[PlannedFile]:
        """This rank's files of at most `file_bytes`."""
        pieces = [piece for item in plan.items for piece in _pieces(item, self._payload_bytes)]
        # Sorting by element size, widest first, aligns every entry to its element size.
        pieces.sort(key=lambda piece: -_properties(piece.item).dtype.itemsize)
        files = []
        for number, group in enumerate(_groups(pieces, self._payload_bytes)):
            name = f"{plan.storage_data}-{number:05d}.safetensors"
            files.append(PlannedFile(name, _header(name, group), group))
        return files

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: writes index.json from the ranks' results and publishes. Raises OSError."""
        files = {
            result.storage_data.chunk.file: result.storage_data.record for of_rank in results for result in of_rank
        }
        self._publish(files | write_index(self.directory, index_of(metadata, results)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: torch must not select this storage by path."""
        return False


class SafetensorsReader(StorageReader):
    """Reads the boxes of a load plan; their places come from the index alone."""

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory = directory
        self._index = index
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, record in index.tensors.items()
            for chunk in record.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: no state is kept between loads."""

    def read_metadata(self) -> Metadata:
        """Converts the index to torch's metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[record.dtype]),
                    size=torch.Size(record.shape),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.lengths))
                        for chunk in record.chunks
                    ],
                )
                for name, record in self._index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns torch's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns torch's plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies every planned box into its tensor, file by file.

        Raises:
            CheckpointError: a file cannot be read.
        """
        items: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[self._chunks[item.storage_index].file].append(item)
        for name, of_file in sorted(items.items()):
            path = self._directory / name
            try:
                with safetensors.safe_open(path, framework="pt") as file:
                    for item in of_file:
                        planner.resolve_tensor(item).detach().copy_(self._read(file, item))
            except (safetensors.SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, file: Any, item: ReadItem) -> Tensor:
        name = item.storage_index.fqn
        chunk = self._chunks[item.storage_index]
        key = chunk_key(name, self._index.tensors[name].shape, chunk)
        if list(item.lengths) == chunk.lengths:
            return file.get_tensor(key)
        box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
        return file.get_slice(key)[box]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: torch must not select this storage by path."""
        return False


def header_problems(directory: Path, index: Index, files: Sequence[str]) -> list[str]:
    """Compares the headers of `files` with the index: lists entries missing, added, or of another dtype or shape."""
    expected: dict[str, dict[str, tuple[str, list[int]]]] = {file: {} for file in files}
    for name, record in index.tensors.items():
        for chunk in record.chunks:
            if chunk.file in expected:
                expected[chunk.file][chunk_key(name, record.shape, chunk)] = (record.dtype, chunk.lengths)
    problems = []
    for file in files:
        try:
            found = _read_header(directory / file)
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{directory / file}: not a safetensors file: {error}")
            continue
        for key in sorted(found.keys() | expected[file].keys()):
            if found.get(key) != expected[file].get(key):
                problems.append(
                    f"{directory / file}: {key} is {_entry(found.get(key))}, but "
                    f"{_entry(expected[file].get(key))} in the index"
                )
    return problems


def _entry(entry: tuple[str, list[int]] | None) -> str:
    return "absent" if entry is None else f"{entry[0]} {entry[1]}"


def _read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    with io.BufferedReader(open_regular(path, follow_links=False)) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise ValueError(f"its header claims {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    entries = {}
    for key, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
                dtype in DTYPES and all(type(n) is int and n >= 0 for n in shape)
            ):
                pass
            case _:
                raise ValueError(f"its entry {key[:100]!r} is malformed")
        if not 0 <= begin <= end <= size - 8 - length or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"its entry {key[:100]!r} is out of bounds")
        entries[key] = (dtype, list(shape))
    return entries


def _properties(item: WriteItem) -> TensorProperties:
    assert item.tensor_data is not None, item.index
    return item.tensor_data.properties


def _offsets(piece: TensorPiece) -> tuple[int, ...]:
    assert piece.item.tensor_data is not None, piece.item.index
    outer = piece.item.tensor_data.chunk.offsets
    return tuple(first + start for first, start in zip(outer, piece.starts, strict=True))


def dtype_of(piece: TensorPiece) -> torch.dtype:
    """Dtype of a piece."""
    return _properties(piece.item).dtype


def num_bytes(piece: TensorPiece) -> int:
    """Bytes of a piece."""
    return math.prod(piece.lengths) * dtype_of(piece).itemsize


def _pieces(item: WriteItem, limit_bytes: int) -> Iterator[TensorPiece]:
    """Cuts an item that is larger than a file along its first dims; yields nothing for an empty shard."""
    assert item.tensor_data is not None, item.index
    lengths = tuple(item.tensor_data.chunk.sizes)
    if math.prod(lengths) > 0:
        yield from _cut(item, (0,) * len(lengths), lengths, max(1, limit_bytes // _properties(item).dtype.itemsize))


def _cut(item: WriteItem, starts: tuple[int, ...], lengths: tuple[int, ...], limit: int) -> Iterator[TensorPiece]:
    dim = next((dim for dim, length in enumerate(lengths) if length > 1), None)
    if dim is None or math.prod(lengths) <= limit:
        yield TensorPiece(item, starts, lengths)
        return
    step = max(1, limit // math.prod(lengths[dim + 1 :]))
    for first in range(0, lengths[dim], step):
        count = min(step, lengths[dim] - first)
        yield from _cut(
            item,
            (*starts[:dim], starts[dim] + first, *starts[dim + 1 :]),
            (*lengths[:dim], count, *lengths[dim + 1 :]),
            limit,
        )


def _groups(pieces: Iterable[TensorPiece], limit_bytes: int) -> Iterator[list[TensorPiece]]:
    group, size = list[TensorPiece](), 0
    for piece in pieces:
        if group and size + num_bytes(piece) > limit_bytes:
            yield group
            group, size = [], 0
        group.append(piece)
        size += num_bytes(piece)
    if group:
        yield group


def piece_tensor(planner: SavePlanner, piece: TensorPiece) -> Tensor:
    """The box of a piece, a view of the tensor to save."""
    tensor = planner.resolve_data(piece.item)
    assert isinstance(tensor, Tensor), piece.item.index
    box = tuple(slice(start, start + length) for start, length in zip(piece.starts, piece.lengths, strict=True))
    return tensor.detach()[box]


def array_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor in host memory, as a NumPy array over the same memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def write_file(path: Path, parts: Iterable[Any]) -> FileRecord:
    """Writes, hashes and syncs a new file of these parts. Raises OSError."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "xb") as file:
        for data in parts:
            digest.update(data)
            size += file.write(data)
        sync(file)
    return FileRecord(size=size, sha256=digest.hexdigest())


def write_results(file: PlannedFile, record: FileRecord | None) -> list[WriteResult]:
    """Results of a file for torch; `record` is None if it is written later."""
    results = []
    for piece in file.pieces:
        chunk = Chunk(offsets=list(_offsets(piece)), lengths=list(piece.lengths), file=file.name)
        results.append(WriteResult(piece.item.index, num_bytes(piece), _Stored(chunk, record)))
    return results


def done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    """A future of torch that has these results."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


def index_of(metadata: Metadata, results: list[list[WriteResult]]) -> Index:
    """The index of a checkpoint from torch's metadata and the results of all ranks."""
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for result in (result for of_rank in results for result in of_rank):
        chunks[result.index.fqn].append(result.storage_data.chunk)
    records = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name
        dtype = DTYPE_NAMES[tensor.properties.dtype]
        records[name] = TensorRecord(dtype=dtype, shape=list(tensor.size), chunks=chunks[name])  # type: ignore[arg-type]
    return Index(tensors=records)


def write_index(directory: Path, index: Index) -> dict[str, FileRecord]:
    """Writes index.json; returns its record by its name. Raises OSError."""
    data = index.model_dump_json().encode()
    write_new(directory / INDEX_FILE, data)
    return {INDEX_FILE: FileRecord.of(data)}


def _header(name: str, pieces: Sequence[TensorPiece]) -> bytes:
    """The header of a safetensors file, with its length before it."""
    header: dict[str, Any] = {}
    position = 0
    for piece in pieces:
        assert piece.item.tensor_data is not None, piece.item.index
        chunk = Chunk(offsets=list(_offsets(piece)), lengths=list(piece.lengths), file=name)
        key = chunk_key(piece.item.index.fqn, list(piece.item.tensor_data.size), chunk)
        end = position + num_bytes(piece)
        dtype = DTYPE_NAMES[_properties(piece.item).dtype]
        header[key] = {"dtype": dtype, "shape": list(piece.lengths), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
