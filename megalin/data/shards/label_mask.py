"""Label masks of token shards: one bit a token, checked on open, read in ranges, written as a stream.

`PREFIX.mask.bin`, little endian; N = tokens of `PREFIX.bin`:

    offset  size           field
    0       8              magic: ASCII "MGLMASK1"
    8       8              u64, N
    16      ceil(N / 8)    bit t % 8 (0 = lowest) of byte t // 8 is 1 where token t counts as a label; unused bits are 0
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megalin.errors import DataError
from megalin.files import open_input, open_temporary, publish, read_range, read_ranges, storage_errors, temporary_name

MAGIC = b"MGLMASK1"
_HEADER = struct.Struct("<8sQ")  # magic, tokens N
_REMEDY = (
    "write the mask again together with its shard, or remove it and the shard's manifest so that every token counts as "
    "a label"
)
_BLOCK_BYTES = 1 << 20

BoolArray = npt.NDArray[np.bool_]


def label_mask_path(prefix: str | Path) -> Path:
    """Path of the label mask of the shard `prefix`."""
    return Path(f"{prefix}.mask.bin")


def has_label_mask(prefix: str | Path) -> bool:
    """True where the shard `prefix` has a label mask; a dangling link counts, so that opening it fails."""
    return os.path.lexists(label_mask_path(prefix))


def remove_label_mask(prefix: str | Path) -> None:
    """Removes the label mask of the shard `prefix`, if there is one; the tokens of a shard `prefix`.mask stay."""
    path = label_mask_path(prefix)
    with contextlib.suppress(FileNotFoundError):
        with path.open("rb") as file:
            is_mask = file.read(len(MAGIC)) == MAGIC
        if is_mask:
            path.unlink()


class LabelMask:
    """A validated label mask; bits are read on demand. Thread-safe.

    Attributes:
        path: of the file.
        file: the open file.
        num_tokens: N.
    """

    def __init__(self, prefix: str | Path, num_tokens: int) -> None:
        """Opens and validates the mask of the shard `prefix` of `num_tokens`.

        Raises:
            DataError: the file is missing, not regular, unreadable, truncated, corrupt or of other tokens; the message
                names it, what was expected, what was found, and the remedy.
        """
        self.path, self.num_tokens = label_mask_path(prefix), num_tokens
        self._bytes = _HEADER.size + -(-num_tokens // 8)
        self._digest: str | None = None
        self.file = open_input(self.path, remedy=_REMEDY)
        try:
            self._check()
        except BaseException:
            self.file.close()
            raise

    def _check(self) -> None:
        size = os.fstat(self.file.fileno()).st_size
        header = os.pread(self.file.fileno(), _HEADER.size, 0)
        if len(header) < _HEADER.size:
            raise self._error(f"a header of {_HEADER.size} bytes", f"a file of {size} bytes")
        magic, num_tokens = _HEADER.unpack(header)
        if magic != MAGIC:
            raise self._error(f"the magic {MAGIC!r}", repr(magic))
        if num_tokens != self.num_tokens:
            raise self._error(f"the mask of {self.num_tokens} tokens, as in its shard", f"one of {num_tokens}")
        if size != self._bytes:
            raise self._error(f"{self._bytes} bytes for {num_tokens} tokens", f"{size} bytes")
        if used := num_tokens % 8:
            last = self._read_bytes(self._bytes - 1, 1)[0]
            if last >> used:
                raise self._error(f"zeros after the {used} used bits of the last byte", f"0x{last:02x}")

    def _error(self, expected: str, found: str) -> DataError:
        return DataError(f"{self.path}: expected {expected}; found {found}; {_REMEDY}")

    def _read_bytes(self, start: int, size: int) -> bytearray:
        return read_range(self.file, self.path, start, size, file_bytes=self._bytes)

    def read(self, position: int, count: int) -> BoolArray:
        """Reads whether tokens [position, position + count) count as labels, [count].

        Raises:
            DataError: the file fails, or has shrunk since it was opened.
        """
        assert 0 <= position <= position + count <= self.num_tokens, (position, count, self.num_tokens)
        first, end = position // 8, -(-(position + count) // 8)
        data = self._read_bytes(_HEADER.size + first, end - first)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_)
        return bits[position - 8 * first :][:count]

    def read_ranges(self, positions: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> BoolArray:
        """Reads the bits of tokens [position, position + count) of several places, [sum of counts]; as `read`."""
        ends = positions + counts
        assert positions.min(initial=0) >= 0 <= counts.min(initial=0), (positions, counts)
        assert ends.max(initial=0) <= self.num_tokens, (positions, counts, self.num_tokens)
        first = positions // 8
        sizes = -(-ends // 8) - first
        data = read_ranges(
            self.file, self.path, (_HEADER.size + first).tolist(), sizes.tolist(), file_bytes=self._bytes
        )
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_)
        # The place of a token's bit is its number among all tokens read, plus the bits left out before it.
        starts = 8 * (np.cumsum(sizes) - sizes) + positions % 8
        left_out = starts - (np.cumsum(counts) - counts)
        return bits[np.arange(counts.sum()) + np.repeat(left_out, counts)]

    def count(self, first: int, end: int) -> int:
        """Number of labels among tokens [first, end). Raises DataError as `read`."""
        return sum(int(np.count_nonzero(block)) for block in self._blocks(first, end))

    def any(self, first: int, end: int) -> bool:
        """True where one of the tokens [first, end) counts as a label. Raises DataError as `read`."""
        return any(bool(block.any()) for block in self._blocks(first, end))

    def _blocks(self, first: int, end: int) -> Iterator[BoolArray]:
        for position in range(first, end, 8 * _BLOCK_BYTES):
            yield self.read(position, min(8 * _BLOCK_BYTES, end - position))

    def digest(self) -> str:
        """sha256, in hex, of the file's bytes as the first call reads them. Raises DataError as `read`."""
        if self._digest is None:
            self._digest = self.read_digest()
        return self._digest

    def read_digest(self) -> str:
        """As `digest`, of the bytes as they are now."""
        state = hashlib.sha256()
        for start in range(0, self._bytes, _BLOCK_BYTES):
            state.update(self._read_bytes(start, min(_BLOCK_BYTES, self._bytes - start)))
        return state.hexdigest()


class LabelMaskWriter:
    """Streams the label mask of a new shard; the file gets its name in `publish`, just before the shard's .idx.

    Memory: what is added at a time, and at most seven bits.

    Attributes:
        num_tokens: added so far.
        label_tokens: of these, those that count as labels.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Starts the mask under a temporary name.

        Raises:
            StorageError: the folder cannot be written, or another process is writing this mask.
        """
        self._path = label_mask_path(prefix)
        self.num_tokens = self.label_tokens = 0
        self._rest: BoolArray = np.empty(0, np.bool_)  # bits of the unfinished byte
        self._file = open_temporary(self._path)
        self._file.seek(_HEADER.size)

    def add(self, mask: BoolArray) -> None:
        """Appends the bits of the next tokens, [tokens]. Raises StorageError."""
        assert mask.ndim == 1, mask.shape
        assert mask.dtype == np.bool_, mask.dtype
        self.num_tokens += len(mask)
        self.label_tokens += int(np.count_nonzero(mask))
        bits = np.concatenate([self._rest, mask])
        whole = len(bits) - len(bits) % 8
        self._rest = bits[whole:].copy()
        with storage_errors(self._path):
            self._file.write(np.packbits(bits[:whole], bitorder="little").data)

    def publish(self) -> str:
        """Publishes the mask durably under its name; returns the sha256, in hex, of its file. Raises StorageError."""
        state = hashlib.sha256()
        with storage_errors(self._path):
            self._file.write(np.packbits(self._rest, bitorder="little").data)
            self._file.seek(0)
            self._file.write(_HEADER.pack(MAGIC, self.num_tokens))
            self._file.seek(0)  # the header, which is written last, is hashed first
            while block := self._file.read(_BLOCK_BYTES):
                state.update(block)
        publish(self._file, self._path)
        self._file.close()
        return state.hexdigest()

    def discard(self) -> None:
        """Removes the unpublished mask; harmless after `publish`."""
        if self._file.closed:
            return
        temporary_name(self._path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk fails here again, on the unwritten rest
            self._file.close()
