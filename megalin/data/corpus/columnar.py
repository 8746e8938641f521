"""Rows of columnar files: parquet, and Arrow's files and streams (Feather is an Arrow file)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from megalin.data.corpus.inputs import ARROW, PARQUET, Span, content_suffix
from megalin.errors import DataError
from megalin.optional import require

_PARQUET_ROWS = 64  # decoded at a time
_ARROW_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

Row = tuple[bytes | None, ...]


def is_columnar(path: str) -> bool:
    """True for a file of rows and columns, by its name."""
    return content_suffix(path) in (PARQUET, *ARROW)


def read_rows(raw: BinaryIO, span: Span, keys: Sequence[str]) -> Iterator[Row]:
    """Yields the values of the columns `keys` in the rows of the span, undecoded.

    Raises:
        DataError: not such a file, damaged, or without a column of strings for each key.
        ConfigError: pyarrow is not installed.
    """
    kind = "parquet" if content_suffix(span.path) == PARQUET else "Arrow"
    arrow = require("pyarrow", f"{span.path}: reading {kind}")
    try:
        for batch in _parquet_batches(raw, span, keys) if kind == "parquet" else _arrow_batches(raw, span, keys):
            columns = [batch.column(key).cast(arrow.large_binary()).to_pylist() for key in keys]
            yield from zip(*columns, strict=True)
    except arrow.ArrowException as error:
        text = str(error).partition("\n")[0]
        article = "a" if kind == "parquet" else "an"
        raise DataError(f"{span.path}: not {article} {kind} file, or damaged: {text}") from None


def _parquet_batches(raw: BinaryIO, span: Span, keys: Sequence[str]) -> Iterator[Any]:
    file = require("pyarrow.parquet", span.path).ParquetFile(raw)
    _check_columns(file.schema_arrow, span.path, keys)
    groups = list(range(span.start, span.end))
    yield from file.iter_batches(_PARQUET_ROWS, groups, columns=list(keys), use_threads=False)


def _arrow_batches(raw: BinaryIO, span: Span, keys: Sequence[str]) -> Iterator[Any]:
    ipc = require("pyarrow.ipc", span.path)
    first = raw.read(len(_ARROW_FILE))
    if first.startswith(_FEATHER_1):
        raise DataError(f"{span.path}: Feather version 1; write it again with version 2")
    is_file = first == _ARROW_FILE
    if not is_file and raw.seek(0, 2) >= len(_END_OF_STREAM):
        # pyarrow takes a stream that is cut between two batches for a whole one.
        raw.seek(-len(_END_OF_STREAM), 2)
        if raw.read() != _END_OF_STREAM:
            raise DataError(f"{span.path}: not an Arrow file, or damaged: no end of the stream; copy the file again")
    raw.seek(0)
    reader = ipc.open_file(raw) if is_file else ipc.open_stream(raw)
    _check_columns(reader.schema, span.path, keys)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        chosen = batch.select(list(keys))
        chosen.validate(full=True)  # offsets from outside would be followed
        yield chosen


def _check_columns(schema: Any, path: str, keys: Sequence[str]) -> None:
    types = require("pyarrow", path).types
    kinds = {field.name: field.type for field in schema}
    for key in keys:
        kind = kinds.get(key)
        if kind is None:
            raise DataError(f"{path}: has no column {key!r}, only {', '.join(kinds)}; change --json-keys")
        if (count := schema.names.count(key)) > 1:
            raise DataError(f"{path}: has {count} columns {key!r}; rename all but one, or change --json-keys")
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)):
            raise DataError(f"{path}: column {key!r} has type {kind}, not string; change --json-keys")
