"""What is read of a corpus at a time: documents and bad lines of about a mebibyte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megalin.data.corpus.documents import BadLine, Document, Reader

_BATCH_BYTES = 1 << 20
_BATCH_LINES = 1000


class ReadBatch(NamedTuple):
    """Lines that follow each other, and the bytes of the file that were read since the batch before."""

    documents: list[Document]
    bad_lines: list[BadLine]
    read_bytes: int  # 0 in the last batch: a reader that has ended does not know


def batches(reader: Reader) -> Iterator[ReadBatch]:
    """Everything in `reader`, in batches that end with 1 MiB of documents or 1000 lines. Raises as `Reader` does."""
    documents: list[Document] = []
    bad_lines: list[BadLine] = []
    size = told = 0
    for item in reader:
        if isinstance(item, BadLine):
            bad_lines.append(item)
        else:
            documents.append(item)
            size += item.size_bytes
        if size >= _BATCH_BYTES or len(documents) + len(bad_lines) >= _BATCH_LINES:
            yield ReadBatch(documents, bad_lines, reader.read_bytes - told)
            told = reader.read_bytes
            documents, bad_lines, size = [], [], 0
    if documents or bad_lines:
        yield ReadBatch(documents, bad_lines, 0)
