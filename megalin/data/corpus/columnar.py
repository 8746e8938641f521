"""Rows of columnar files: parquet, and Arrow's files and streams (Feather is an Arrow file)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from megalin.data.corpus.arrow_messages import batch_sizes
from megalin.data.corpus.decompression import check_expansion
from megalin.data.corpus.inputs import ARROW, PARQUET, Span, content_suffix
from megalin.errors import DataError
from megalin.optional import require

_PARQUET_ROWS = 64  # decoded at a time, and fewer where an entry of a dictionary could repeat beyond
_BATCH_BYTES = 128 << 20
_EXPANSION_FREE_BYTES = 256 << 20
_ARROW_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_TEXT = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
"""pyarrow.types' tests of text."""

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
        if kind == "parquet":
            file = require("pyarrow.parquet", span.path).ParquetFile(raw)
            _check_columns(file.schema_arrow, span.path, keys)
            yield from zip(*(_parquet_column(file, span, key) for key in keys), strict=True)
        else:
            for batch in _arrow_batches(raw, span, keys):
                yield from zip(*(_values(batch.column(key)) for key in keys), strict=True)
    except (arrow.ArrowException, UnicodeDecodeError) as error:  # the second: a column's name
        text = str(error).partition("\n")[0]
        article = "a" if kind == "parquet" else "an"
        raise DataError(f"{span.path}: not {article} {kind} file, or damaged: {text}") from None


def _parquet_column(file: Any, span: Span, key: str) -> Iterator[bytes | None]:
    """Yields a column's values in the row groups of the span.

    Memory: some rows of plain text, and the whole row group of a dictionary's column, whose texts are stored once. An
    encoded page repeats entries of its dictionary for next to no bytes: as many rows are decoded at a time as fit into
    128 MiB if each were all of the column.

    Raises:
        DataError: a column of a row group expands too far.
    """
    is_dictionary = require("pyarrow", span.path).types.is_dictionary(file.schema_arrow.field(key).type)
    for group in range(span.start, span.end):
        metadata = file.metadata.row_group(group)
        chunks = (metadata.column(index) for index in range(metadata.num_columns))
        chunk = next(chunk for chunk in chunks if chunk.path_in_schema == key)
        size, what = chunk.total_uncompressed_size, f"{span.path}: column {key!r} of row group {group}"
        check_expansion(what, size, chunk.total_compressed_size, free_bytes=_EXPANSION_FREE_BYTES)
        rows = _PARQUET_ROWS
        if is_dictionary:
            rows = metadata.num_rows
        elif chunk.has_dictionary_page:
            rows = min(rows, max(1, _BATCH_BYTES // max(size, 1)))
        for batch in file.iter_batches(rows, [group], columns=[key], use_threads=False):
            yield from _values(batch.column(0))


def _values(column: Any) -> Iterator[bytes | None]:
    """Yields the values of an array of text, one at a time in memory; null: None."""
    arrow = require("pyarrow", "reading a column")
    if isinstance(column, arrow.DictionaryArray):
        texts = column.dictionary.cast(arrow.large_binary())
        for index in column.indices:
            yield texts[index.as_py()].as_py() if index.is_valid else None
    else:
        for value in column.cast(arrow.large_binary()):
            yield value.as_py()


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
    # A file is read as the stream in it, whose sizes are known.
    count = ipc.open_file(raw).num_record_batches if is_file else None
    start = len(_ARROW_FILE) + 2 if is_file else 0
    _check_sizes(raw, start, span.path)
    raw.seek(start)
    reader = ipc.open_stream(raw)
    _check_columns(reader.schema, span.path, keys)
    number = 0
    for number, batch in enumerate(reader, start=1):  # noqa: B007
        chosen = batch.select(list(keys))
        chosen.validate(full=True)  # offsets from outside would be followed
        yield chosen
    if count not in (None, number):
        raise DataError(f"{span.path}: not an Arrow file, or damaged: {number} batches of {count}; copy the file again")


def _check_sizes(raw: BinaryIO, start: int, path: str) -> None:
    """Raises DataError for a batch that expands too far, before pyarrow allocates its memory."""
    try:
        for number, size in enumerate(batch_sizes(raw, start), start=1):
            what = f"{path}: batch or dictionary {number}"
            check_expansion(what, size.expanded, size.stored, free_bytes=_EXPANSION_FREE_BYTES)
    except ValueError as error:
        raise DataError(f"{path}: not an Arrow file, or damaged: {error}") from None


def _check_columns(schema: Any, path: str, keys: Sequence[str]) -> None:
    types = require("pyarrow", path).types
    kinds = {field.name: field.type for field in schema}
    for key in keys:
        kind = kinds.get(key)
        if kind is None:
            raise DataError(f"{path}: has no column {key!r}, only {', '.join(kinds)}; change --json-keys")
        if (count := schema.names.count(key)) > 1:
            raise DataError(f"{path}: has {count} columns {key!r}; rename all but one, or change --json-keys")
        value = kind.value_type if types.is_dictionary(kind) else kind
        # A column without any text has the type null.
        if not any(is_text(value) for is_text in (*(getattr(types, name) for name in _TEXT), types.is_null)):
            raise DataError(f"{path}: column {key!r} has type {kind}, not string; change --json-keys")
