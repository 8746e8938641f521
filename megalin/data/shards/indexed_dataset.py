"""Megatron `.bin/.idx` token shards: a reader that validates on open, a writer that publishes whole files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megalin._index import check_lengths
from megalin.data.shards.digests import BLOCK_BYTES, BlockHasher, HashedFile
from megalin.data.shards.index_file import TOKEN_DTYPES, read_index, refuse, write_index
from megalin.data.shards.label_mask import LabelMask, LabelMaskWriter, has_label_mask, remove_label_mask
from megalin.errors import DataError, StorageError
from megalin.files import (
    open_input,
    open_temporary,
    publish,
    read_range,
    read_ranges,
    storage_errors,
    temporary_name,
    write_text,
)

# Megatron's writer leaves 36 values of uint16 free; readers trust the header, so this rule is the writer's alone.
_UINT16_VOCABULARY = 65500

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Token dtype of Megatron's writer: uint16 for fewer than 65,500 ids, else int32."""
    return TOKEN_DTYPES[8 if vocab_size < _UINT16_VOCABULARY else 4]


def bin_path(prefix: str | Path) -> Path:
    """Path of the tokens of the shard `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Path of the index of the shard `prefix`."""
    return Path(f"{prefix}.idx")


def manifest_path(prefix: str | Path) -> Path:
    """Path of the manifest: how the shard `prefix` was made (JSON; Megatron neither writes nor reads it)."""
    return Path(f"{prefix}.manifest.json")


class Shard:
    """A validated shard of N sequences in D - 1 documents; tokens are read on demand, the index is in memory.

    Attributes:
        prefix: the path without `.bin` and `.idx`.
        dtype: of the tokens, from the header: uint16 or int32.
        lengths: [N] int32, tokens in each sequence.
        pointers: [N] int64, byte offset of each sequence in the .bin.
        documents: [D] int64, entry k is the first sequence of document k and the last entry is N.
        num_tokens: the sum of `lengths`.
        label_mask: the tokens that count as labels; None without a mask file: all of them.
        reading: identifiers of the threads that read its .bin now.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int | None = None) -> None:
        """Opens and validates the shard; `vocab_size`, if given, must fit the dtype.

        Raises:
            DataError: a file is missing, not regular, unreadable, truncated, corrupt, of another format or of another
                shard, also the label mask; the message names the file, what was expected and what was found.
        """
        self.prefix = Path(prefix)
        self.reading: set[int] = set()
        remedy = "give the prefix of a shard, without .bin or .idx"
        self._bin_path = bin_path(prefix)
        self._bin = open_input(self._bin_path, remedy=remedy)
        try:
            with open_input(idx_path(prefix), remedy=remedy) as idx:
                index = read_index(idx_path(prefix), idx)
            self.dtype, self.lengths, self.pointers, self.documents, self._index = index
            self._check_lengths()
            if vocab_size is not None and self.dtype.itemsize == 2 and vocab_size > 2**16:
                refuse(idx_path(prefix), f"a dtype that holds {vocab_size} token ids", self.dtype.name)
            self.label_mask = LabelMask(prefix, self.num_tokens) if has_label_mask(prefix) else None
        except BaseException:
            self._bin.close()
            raise

    def _check_lengths(self) -> None:
        """Checks that lengths are not negative, pointers their running sum, and the .bin exactly their total."""
        path, itemsize = idx_path(self.prefix), self.dtype.itemsize
        bad, total = check_lengths(self.lengths, self.pointers, itemsize=itemsize)
        if bad < len(self.lengths):
            if self.lengths[bad] < 0:
                refuse(path, f"a length of at least 0 for sequence {bad}", str(self.lengths[bad]))
            refuse(path, f"pointer {total * itemsize} for sequence {bad}", str(self.pointers[bad]))
        self.num_tokens = total
        size = os.fstat(self._bin.fileno()).st_size
        if size != total * itemsize:
            expected = f"{total * itemsize} bytes ({total} {self.dtype.name} tokens in {path.name})"
            refuse(bin_path(self.prefix), expected, f"{size} bytes; truncated, or of another shard")

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def first_token(self, sequence: int) -> int:
        """Position in the shard at which `sequence` (0 to N) starts."""
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def locate(self, position: int) -> tuple[int, int]:
        """Sequence that contains token `position` of the shard, and the offset in it; slow, for messages."""
        assert 0 <= position < self.num_tokens, (position, self.num_tokens)
        sequence = int(np.searchsorted(self.pointers, position * self.dtype.itemsize, side="right")) - 1
        return sequence, position - self.first_token(sequence)

    def read(self, position: int, count: int) -> TokenArray:
        """Reads tokens [position, position + count) of the shard, [count] of `dtype`.

        Raises:
            DataError: the file fails, or has shrunk since it was opened.
        """
        assert 0 <= position <= position + count <= self.num_tokens, (position, count, self.num_tokens)
        itemsize = self.dtype.itemsize
        return np.frombuffer(self._read_marked(read_range, position * itemsize, count * itemsize), self.dtype)

    def read_checked(self, position: int, count: int, *, vocab_size: int) -> TokenArray:
        """As `read`; raises DataError with file, sequence, offset and id where an id is not in 0 .. vocab_size - 1."""
        tokens = self.read(position, count)
        bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        if bad.size:
            sequence, offset = self.locate(position + int(bad[0]))
            raise DataError(
                f"{bin_path(self.prefix)}: token id {tokens[bad[0]]} at offset {offset} of sequence {sequence}; "
                f"expected ids from 0 to {vocab_size - 1}: is vocab_size = {vocab_size} the tokenizer's?"
            )
        return tokens

    def read_ranges(
        self, positions: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], *, vocab_size: int
    ) -> tuple[TokenArray, npt.NDArray[np.bool_]]:
        """Reads tokens [position, position + count) of several places and whether they count as labels.

        Returns:
            tokens [sum of counts] of `dtype` and label mask [sum of counts], one place after the other.

        Raises:
            DataError: as `read_checked`.
        """
        assert positions.min(initial=0) >= 0 <= counts.min(initial=0), (positions, counts)
        assert (positions + counts).max(initial=0) <= self.num_tokens, (positions, counts, self.num_tokens)
        itemsize = self.dtype.itemsize
        data = self._read_marked(read_ranges, (positions * itemsize).tolist(), (counts * itemsize).tolist())
        tokens = np.frombuffer(data, self.dtype)
        if tokens.size and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
            for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
                self.read_checked(position, count, vocab_size=vocab_size)
        if self.label_mask is None:
            return tokens, np.ones(tokens.size, np.bool_)
        return tokens, self.label_mask.read_ranges(positions, counts)

    def _read_marked(self, read: Callable[..., Any], *places: Any) -> Any:
        """Reads places of the .bin, while this thread is marked as a reader."""
        thread = threading.get_ident()
        self.reading.add(thread)
        try:
            return read(self._bin, self._bin_path, *places, file_bytes=self.bin_bytes)
        finally:
            self.reading.discard(thread)

    @property
    def bin_bytes(self) -> int:
        """Size of the .bin."""
        return self.num_tokens * self.dtype.itemsize

    def index_digest(self) -> str:
        """sha256, in hex, of the .idx as it was read on open."""
        return hashlib.sha256(self._index.data).hexdigest()

    def block_digest(self, number: int) -> str:
        """sha256, in hex, of a block of the .bin (`digests.BLOCK_BYTES`). Raises DataError as `read`."""
        start, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.bin_bytes)
        data = read_range(self._bin, self._bin_path, start, end - start, file_bytes=self.bin_bytes)
        return hashlib.sha256(data).hexdigest()

    def read_label_mask(self, position: int, count: int) -> npt.NDArray[np.bool_]:
        """Reads whether tokens [position, position + count) count as labels, [count]; all do without a mask."""
        if self.label_mask is None:
            return np.ones(count, np.bool_)
        return self.label_mask.read(position, count)

    def files(self) -> list[tuple[Path, io.FileIO]]:
        """Path and open file of the .bin and of the label mask."""
        mask = self.label_mask
        return [(self._bin_path, self._bin), *([] if mask is None else [(mask.path, mask.file)])]

    def close(self) -> None:
        """Closes the .bin and the mask; `read` fails afterwards."""
        for _, file in self.files():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_manifest(prefix: str | Path, manifest: Mapping[str, Any]) -> None:
    """Replaces the manifest of the shard `prefix`. Raises StorageError."""
    write_text(manifest_path(prefix), json.dumps(manifest, indent=2) + "\n")


def publish_shard(
    prefix: Path,
    tokens: BinaryIO,
    dtype: np.dtype[Any],
    lengths: Sequence[npt.NDArray[Any]],
    documents: Sequence[tuple[npt.NDArray[np.int64], int]],
    manifest: Mapping[str, Any] | None,
    label_mask: LabelMaskWriter | None = None,
    blocks: BlockHasher | None = None,
) -> None:
    """Publishes the temporary .bin `tokens`, mask, manifest and .idx durably under their names, the .idx last.

    The manifest holds the counts, the digests of .bin, .idx and mask, and the entries of `manifest`.

    Args:
        lengths: of the whole shard, in pieces that may be mapped: a few MiB are copied at a time.
        documents: the document index likewise, each piece with an offset that is added to it.
        blocks: has hashed `tokens`; without it there is no manifest.

    Raises:
        StorageError: the disk is full or fails; then no .idx has the name.
    """
    path = idx_path(prefix)
    with open_temporary(path) as idx:
        hashed = HashedFile(idx)
        with storage_errors(path):
            write_index(hashed, dtype, lengths, documents)
            # An older shard of this name must not pair its index with the new tokens, not even for a moment.
            path.unlink(missing_ok=True)
            manifest_path(prefix).unlink(missing_ok=True)
            remove_label_mask(prefix)
        publish(tokens, bin_path(prefix))
        mask = None if label_mask is None else label_mask.publish()
        if blocks is not None:
            digests = blocks.digests(hashed.hexdigest(), mask)
            counts = {
                "documents": sum(len(piece) for piece, _ in documents) - 1,
                "sequences": sum(len(piece) for piece in lengths),
                "tokens": digests.bin_bytes // dtype.itemsize,
                "dtype": dtype.name,
                **({} if label_mask is None else {"label_tokens": label_mask.label_tokens}),
            }
            write_manifest(prefix, {**counts, **(manifest or {}), "digests": digests.entry()})
        publish(idx, path)


class ShardWriter:
    """Streams sequences into a new shard; no file has its name before `publish`, so a killed writer leaves none.

    Memory: 4 bytes a sequence and 8 a document. As a context manager it discards an unpublished shard.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype[Any], *, label_mask: bool = False, manifest: bool = True
    ) -> None:
        """Starts `prefix`.bin under a temporary name; `dtype` is `token_dtype(vocab_size)`.

        Args:
            label_mask: write a label mask too.
            manifest: write a manifest with the counts and digests.

        Raises:
            StorageError: the folder cannot be written, or another process is writing this shard.
        """
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in TOKEN_DTYPES.values(), dtype
        self.num_tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._blocks = BlockHasher() if manifest else None
        self._bin = open_temporary(bin_path(prefix))
        try:
            self._label_mask = LabelMaskWriter(prefix) if label_mask else None
        except BaseException:
            temporary_name(bin_path(prefix)).unlink(missing_ok=True)
            self._bin.close()
            raise

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    @property
    def label_tokens(self) -> int:
        """Tokens that count as labels; all do without a label mask."""
        return self.num_tokens if self._label_mask is None else self._label_mask.label_tokens

    def add_sequence(self, tokens: npt.ArrayLike, label_mask: npt.NDArray[np.bool_] | None = None) -> None:
        """Appends one sequence of token ids, [length] of any integer dtype.

        Args:
            label_mask: [length], True for the tokens that count as labels; None: all do. Needs a writer with a mask.

        Raises:
            DataError: an id out of range for the shard's dtype, or a sequence of 2^31 tokens and more.
            StorageError: the disk is full or fails.
        """
        values = np.asarray(tokens)
        if not values.size:
            values = np.empty(0, self.dtype)  # an empty list has no integer dtype of its own
        assert values.ndim == 1, values.shape
        assert values.dtype.kind in "iu", values.dtype
        assert label_mask is None or (self._label_mask is not None and label_mask.shape == values.shape), label_mask
        path = bin_path(self.prefix)
        if values.size and (values.dtype != self.dtype or self.dtype.kind == "i"):
            limit = int(np.iinfo(self.dtype).max)
            low, high = int(values.min()), int(values.max())
            if low < 0 or high > limit:
                refuse(path, f"token ids from 0 to {limit} ({self.dtype.name})", str(low if low < 0 else high))
        if values.size > 2**31 - 1:
            refuse(path, "a sequence of fewer than 2^31 tokens", f"one of {values.size}")
        data = values.astype(self.dtype, copy=False).tobytes()
        with storage_errors(path):
            self._bin.write(data)
        if self._blocks is not None:
            self._blocks.update(data)
        if self._label_mask is not None:
            self._label_mask.add(np.ones(values.size, np.bool_) if label_mask is None else label_mask)
        self._lengths.append(values.size)
        self.num_tokens += values.size

    def end_document(self) -> None:
        """Ends the document of the sequences since the last call; without any it is empty."""
        self._documents.append(len(self._lengths))

    def publish(self, manifest: Mapping[str, Any] | None = None) -> None:
        """Publishes .bin, mask, manifest and .idx durably under their names, the .idx last.

        Args:
            manifest: entries of the manifest besides the counts and digests.

        Raises:
            StorageError: the disk is full or fails; then no .idx has the name.
        """
        assert self._documents[-1] == len(self._lengths), "end_document() was not called after the last sequence"
        lengths = np.frombuffer(self._lengths, np.intc) if self._lengths else np.empty(0, np.intc)
        documents = np.frombuffer(self._documents, np.int64)
        publish_shard(
            self.prefix,
            self._bin,
            self.dtype,
            [lengths],
            [(documents, 0)],
            manifest,
            self._label_mask,
            self._blocks,
        )
        self._bin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bin.closed:
            return
        if self._label_mask is not None:
            self._label_mask.discard()
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            temporary_name(path).unlink(missing_ok=True)
        try:
            self._bin.close()
        except OSError as failure:  # a full disk fails here again, on the unwritten rest
            if error is None:
                raise StorageError(f"{self.prefix}: cannot be written: {failure.strerror}") from failure
