"""Batches of documents and bad lines of about 1 MiB, the unit of work on a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megalin.data.corpus.documents import BadLine, Document, Reader

_BATCH_BYTES = 1 << 20
_BATCH_LINES = 1000


class ReadBatch(NamedTuple):
    """Consecutive documents and bad lines, and the bytes of the file read since the last batch."""

    documents: list[Document]
    bad_lines: list[BadLine]
    read_bytes: int  # 0 in the last batch: unknown once the reader has ended


def batches(reader: Reader) -> Iterator[ReadBatch]:
    """Groups the items of `reader` into batches of 1 MiB of documents or 1000 lines. Raises as `Reader` does."""
    documents: list[Document] = []
    bad_lines: list[BadLine] = []
    size = reported = 0
    for item in reader:
        if isinstance(item, BadLine):
            bad_lines.append(item)
        else:
            documents.append(item)
            size += item.size_bytes
        if size >= _BATCH_BYTES or len(documents) + len(bad_lines) >= _BATCH_LINES:
            yield ReadBatch(documents, bad_lines, reader.read_bytes - reported)
            reported = reader.read_bytes
            documents, bad_lines, size = [], [], 0
    if documents or bad_lines:
        yield ReadBatch(documents, bad_lines, 0)
