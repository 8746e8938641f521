"""The `.idx` file of a shard: its header, its layout, reading with validation, and writing in bounded memory."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from megalin._index import check_documents
from megalin.data.shards.digests import HashedFile
from megalin.errors import DataError
from megalin.files import read_into, read_range

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_OTHER_MAGIC = b"TNTIDX"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences N, document index entries D
_CODE_NAMES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
TOKEN_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
"""Dtypes of tokens by their code in the header."""
_TOKEN_CODES = {dtype: code for code, dtype in TOKEN_DTYPES.items()}
MAX_SEQUENCES = 2**31 - 1  # sequence numbers are int32 in sample indices, here and in Megatron
_BLOCK_ENTRIES = 1 << 20  # entries of the .idx written at a time, to bound the memory


class IndexArrays(NamedTuple):
    """Content of an `.idx` file of N sequences in D - 1 documents, in memory."""

    dtype: np.dtype[Any]
    """Dtype of the tokens."""
    lengths: npt.NDArray[np.int32]
    """[N] tokens in each sequence."""
    pointers: npt.NDArray[np.int64]
    """[N] byte offset of each sequence in the .bin."""
    documents: npt.NDArray[np.int64]
    """[D] entry k is the first sequence of document k, the last entry is N."""
    content: npt.NDArray[np.uint8]
    """[bytes] the whole file, which the other arrays are views of."""


def read_index(path: Path, file: io.FileIO) -> IndexArrays:
    """Reads the open `.idx` file of `path`; checks all but the lengths and pointers.

    Not memory-mapped: a mapped file that shrinks kills the process.

    Raises:
        DataError: truncated, corrupt, of another format or too large for the memory; the message names the file,
            expected and found.
    """
    size = os.fstat(file.fileno()).st_size
    header = read_range(file, path, 0, min(_HEADER.size, size), file_bytes=size)
    if header.startswith(_OTHER_MAGIC):
        raise DataError(f"{path}: a TNTIDX (fairseq, lazy or cached) index; convert it to the MMIDIDX format first")
    if len(header) < _HEADER.size:
        refuse(path, f"a header of {_HEADER.size} bytes", f"a file of {size} bytes")
    magic, version, code, num_sequences, num_entries = _HEADER.unpack(header)
    if magic != MAGIC:
        refuse(path, f"the magic {MAGIC!r}", repr(magic))
    if version != VERSION:
        refuse(path, f"version {VERSION}", str(version))
    if code not in TOKEN_DTYPES:
        found = f"code {code} ({_CODE_NAMES.get(code, 'unknown')})"
        refuse(path, "token dtype code 8 (uint16) or 4 (int32)", found)
    # Python integers: the counts are untrusted 64-bit numbers whose products may pass 2^64.
    expected = _HEADER.size + 12 * num_sequences + 8 * num_entries
    counts = f"{num_sequences} sequences and {num_entries} document entries"
    if size == expected + num_sequences and num_sequences:
        refuse(path, f"{expected} bytes for {counts}", f"{size} bytes, as in a multimodal index with modes")
    if size != expected:
        refuse(path, f"{expected} bytes for {counts}", f"{size} bytes")
    if num_sequences > MAX_SEQUENCES:
        refuse(path, f"at most {MAX_SEQUENCES} sequences", str(num_sequences))
    if num_entries < 1:
        refuse(path, "at least one document entry", "none")
    content = _read_whole(path, file, size)
    offset = _HEADER.size
    lengths = np.frombuffer(content, "<i4", num_sequences, offset)
    offset += 4 * num_sequences
    pointers = np.frombuffer(content, "<i8", num_sequences, offset)
    offset += 8 * num_sequences
    documents = np.frombuffer(content, "<i8", num_entries, offset)
    _check_documents(path, documents, num_sequences)
    return IndexArrays(TOKEN_DTYPES[code], lengths, pointers, documents, content)


def _read_whole(path: Path, file: io.FileIO, size: int) -> npt.NDArray[np.uint8]:
    try:
        content = np.empty(size, np.uint8)
    except MemoryError:
        refuse(path, "an index that fits into memory", f"{size} bytes")
    read_into(file, path, content.data, 0, file_bytes=size)
    content.flags.writeable = False
    return content


def _check_documents(path: Path, documents: npt.NDArray[np.int64], num_sequences: int) -> None:
    if documents[0] != 0:
        refuse(path, "document index 0 to be 0", str(documents[0]))
    bad = check_documents(documents)
    if bad < len(documents):
        refuse(path, f"document index {bad} not below the previous one", str(documents[bad]))
    if documents[-1] != num_sequences:
        refuse(path, f"the last document index to be {num_sequences}, the sequence count", str(documents[-1]))


def write_index(
    idx: HashedFile,
    dtype: np.dtype[Any],
    lengths: Sequence[npt.NDArray[Any]],
    documents: Sequence[tuple[npt.NDArray[np.int64], int]],
) -> None:
    """Writes an `.idx` file, whose pointers are the running sum of the lengths.

    Args:
        lengths: of the whole shard, in pieces that may be mapped: a few MiB are copied at a time.
        documents: the document index likewise, each piece with an offset that is added to it.

    Raises:
        OSError: the disk is full or fails.
    """
    counts = (sum(len(piece) for piece in lengths), sum(len(piece) for piece, _ in documents))
    idx.write(_HEADER.pack(MAGIC, VERSION, _TOKEN_CODES[dtype], *counts))
    for block in _blocks(lengths):
        idx.write(block.astype("<i4", copy=False).data)
    total = 0
    for block in _blocks(lengths):
        ends = np.cumsum(block.astype(np.int64))
        idx.write(((total + ends - block) * dtype.itemsize).astype("<i8", copy=False).data)
        total += int(ends[-1])
    for piece, shift in documents:
        for block in _blocks([piece]):
            idx.write((block + shift).astype("<i8", copy=False).data)


def _blocks(pieces: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
    for piece in pieces:
        for first in range(0, len(piece), _BLOCK_ENTRIES):
            yield piece[first : first + _BLOCK_ENTRIES]


def refuse(path: Path, expected: str, found: str) -> NoReturn:
    """Raises DataError for a file of a shard."""
    raise DataError(f"{path}: expected {expected}; found {found}")
