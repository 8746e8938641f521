"""Sizes of the record batches of an Arrow stream, read from its messages: pyarrow decompresses whole batches."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from typing import BinaryIO, NamedTuple

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_CONTINUATION = -1
_MAX_METADATA = 64 << 20


class BatchSize(NamedTuple):
    """Bytes of a record batch or dictionary."""

    stored: int
    expanded: int


def batch_sizes(raw: BinaryIO, start: int) -> Iterator[BatchSize]:
    """Yields the size of each batch of the stream that begins at `start`. Format: Arrow columnar format 1.x, IPC.

    A compressed buffer begins with the number of its bytes (int64).

    Raises:
        ValueError: damaged.
    """
    position, end = start, raw.seek(0, 2)
    while True:
        raw.seek(position)
        prefix = raw.read(8)
        if len(prefix) < 8:
            return
        mark, length = struct.unpack("<ii", prefix)
        if mark != _CONTINUATION:  # a message without the mark, as before Arrow 0.15
            mark, length, position = _CONTINUATION, mark, position - 4
        if length == 0:
            return
        if not 0 < length <= _MAX_METADATA:
            raise ValueError(f"a message of {length} bytes")
        raw.seek(position + 8)
        try:
            position = yield from _message(raw, _Table.root(raw.read(length)), position + 8 + length)
        except (struct.error, IndexError) as error:
            raise ValueError(f"a damaged message: {error}") from None
        if position > end:
            raise ValueError(f"a message ends at byte {position} of {end}")


def _message(raw: BinaryIO, message: _Table, body: int) -> Generator[BatchSize, None, int]:
    """Yields the size of the batch of a message, if it has one; returns the position after its body."""
    length = message.number(3, "<q")
    if length < 0:
        raise ValueError(f"a body of {length} bytes")
    kind = message.number(1, "<B")
    if kind in (_DICTIONARY_BATCH, _RECORD_BATCH):
        batch = message.table(2) if kind == _RECORD_BATCH else message.table(2).table(1)
        expanded = 0
        for offset, size in batch.pairs(2):
            if size > 0 and batch.has(3):
                raw.seek(body + max(offset, 0))
                (own,) = struct.unpack("<q", raw.read(8))
                expanded += size if own < 0 else own  # -1: not compressed
            else:
                expanded += max(size, 0)
        yield BatchSize(length, expanded)
    return body + length


class _Table(NamedTuple):
    """Table of a flatbuffer. Offsets from outside lead to struct.error at worst."""

    data: bytes
    start: int

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def _field(self, number: int) -> int | None:
        (back,) = struct.unpack_from("<i", self.data, self.start)
        vtable = self.start - back
        if not 0 <= vtable < len(self.data):
            raise struct.error("a table outside of its message")
        (size,) = struct.unpack_from("<H", self.data, vtable)
        place = 4 + 2 * number
        offset = struct.unpack_from("<H", self.data, vtable + place)[0] if place + 2 <= size else 0
        return self.start + offset if offset else None

    def has(self, number: int) -> bool:
        return self._field(number) is not None

    def number(self, number: int, code: str) -> int:
        field = self._field(number)
        return 0 if field is None else int(struct.unpack_from(code, self.data, field)[0])

    def table(self, number: int) -> _Table:
        field = self._field(number)
        if field is None:
            raise struct.error(f"field {number} is missing")
        return _Table(self.data, field + struct.unpack_from("<I", self.data, field)[0])

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """The elements of a vector of two int64 each."""
        vector = self.table(number)
        (count,) = struct.unpack_from("<I", vector.data, vector.start)
        end = vector.start + 4 + 16 * count
        if end > len(vector.data):
            raise struct.error(f"a vector of {count} elements")
        yield from struct.iter_unpack("<qq", vector.data[vector.start + 4 : end])
