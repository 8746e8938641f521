"""Reader of documents from jsonl, parquet, Arrow and plain text, in bounded memory; bad lines are reported by kind."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn, cast

from megalin.data.corpus.columnar import is_columnar, read_rows
from megalin.data.corpus.decompression import DAMAGE, decompress
from megalin.data.corpus.inputs import PARQUET, PLAIN, Span, compression, content_suffix, whole
from megalin.errors import DataError
from megalin.files import open_input
from megalin.optional import require

BadKind = Literal[
    "blank line",
    "too long",
    "invalid UTF-8",
    "not JSON",
    "nested too deeply",
    "not an object",
    "key missing",
    "not a string",
    "lone surrogate",
]
# A blank line is counted with the others, but never stops a run.
HARMLESS: BadKind = "blank line"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON spells one


class Document(NamedTuple):
    """Text of one line, row or text file."""

    line: int  # from 1, counted from the start of the span; the row in parquet or Arrow, 1 for a text file
    texts: tuple[str, ...]  # under each key
    fields: dict[str, Any]  # the whole JSON object; of other formats only the keys
    size_bytes: int


class BadLine(NamedTuple):
    """A line without a valid document."""

    path: str
    line: int
    kind: BadKind
    detail: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}{': ' if self.detail else ''}{self.detail}"


class _RefusedError(Exception):
    def __init__(self, kind: BadKind, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class Reader:
    """Iterates over the documents and bad lines of a span, with at most `limit_bytes` of a line in memory.

    A row of parquet, and a record batch of Arrow, is in memory before its length is known.

    Attributes:
        lines: number read so far, including bad ones.
    """

    def __init__(self, span: Span, keys: Sequence[str], *, limit_bytes: int) -> None:
        """Takes the strings under `keys` of each object or row; a text file's text is under the only key."""
        self.span, self.keys, self.limit_bytes = span, tuple(keys), limit_bytes
        self.lines = 0
        self._raw: BinaryIO | None = None

    @property
    def read_bytes(self) -> int:
        """Bytes of the file, as stored, that the current iteration has read; 0 for parquet and Arrow."""
        if self._raw is None or is_columnar(self.span.path):
            return 0
        return max(min(self._raw.tell(), self.span.end) - self.span.start, 0)

    def __iter__(self) -> Iterator[Document | BadLine]:
        """Yields the documents and bad lines in their order.

        Raises:
            DataError: the file is missing, not a regular file, truncated, corrupt or fails while it is read; it expands
                more than 256 times; it is parquet or Arrow without a column of strings for each key.
            ConfigError: a library for this format is not installed.
        """
        path = self.span.path
        with open_input(Path(path), remedy="check --input") as raw:
            self._raw = raw
            items = self._rows(raw) if is_columnar(path) else self._lines_of(raw)
            try:
                for item in items:
                    self.lines += 1
                    yield item
            except DAMAGE as error:
                reason = getattr(error, "strerror", None) or error
                raise DataError(
                    f"{path}: cannot be read: {reason} (at byte {raw.tell()}); check the disk, or copy the file again"
                ) from None
            finally:
                self._raw = None

    def _lines_of(self, raw: BinaryIO) -> Iterator[Document | BadLine]:
        path, plain = self.span.path, content_suffix(self.span.path) == PLAIN
        file = _content(raw, path)
        if plain:
            data = file.read(self.limit_bytes + 1)
            lines: Iterable[bytes | None] = [data if len(data) <= self.limit_bytes else None]
        else:
            lines = _lines(file, self.limit_bytes, self.span)
        for number, line in enumerate(lines, start=1):
            try:
                if line is None:
                    raise _RefusedError("too long", f"more than {self.limit_bytes} bytes")
                text = _decode(line.removeprefix(_BYTE_ORDER_MARK) if self.span.start == 0 and number == 1 else line)
                fields = {self.keys[0]: text} if plain else _parse_object(text)
                yield Document(number, tuple(_text_of(fields, key) for key in self.keys), fields, len(line))
            except _RefusedError as refusal:
                yield BadLine(path, number, refusal.kind, refusal.detail)

    def _rows(self, raw: BinaryIO) -> Iterator[Document | BadLine]:
        for number, row in enumerate(read_rows(raw, self.span, self.keys), start=1):
            try:
                for key, value in zip(self.keys, row, strict=True):
                    if value is None:
                        raise _RefusedError("key missing", f"{key!r} is null")
                size = sum(map(len, cast(tuple[bytes, ...], row)))
                if size > self.limit_bytes:
                    raise _RefusedError("too long", f"more than {self.limit_bytes} bytes")
                texts = tuple(_utf8(value) for value in cast(tuple[bytes, ...], row))
                yield Document(number, texts, dict(zip(self.keys, texts, strict=True)), size)
            except _RefusedError as refusal:
                yield BadLine(self.span.path, number, refusal.kind, refusal.detail)


def _content(raw: BinaryIO, path: str) -> BinaryIO:
    packed = compression(path)
    if packed is not None:
        return decompress(raw, packed, path)
    return open(raw.fileno(), "rb", closefd=False, buffering=_BUFFER_BYTES)


def _lines(file: BinaryIO, limit_bytes: int, span: Span) -> Iterator[bytes | None]:
    """Yields the lines that start in the span, without line ends; None for one of more than `limit_bytes`.

    A line that is too long is skipped in pieces.
    """
    packed = compression(span.path) is not None
    position = span.start
    if span.start:
        file.seek(span.start - 1)
        position = span.start - 1 + _skip_line(file, span.end - span.start)
    while packed or position < span.end:
        piece = file.readline(limit_bytes + 2)  # two more, so that a line at the limit keeps its CR LF
        if not piece:
            return
        line: bytes | None = piece.rstrip(b"\r\n")
        if line and len(line) > limit_bytes:
            line = None
        while True:
            position += len(piece)
            if not piece or piece.endswith(b"\n"):
                break
            piece = file.readline(limit_bytes + 2)
            if piece.rstrip(b"\r\n"):
                line = None
        yield line


def _skip_line(file: BinaryIO, enough: int) -> int:
    """Reads to the end of the line, or past `enough` bytes of it; returns the number of bytes read."""
    skipped = 0
    while skipped <= enough and (piece := file.readline(_BUFFER_BYTES)):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _utf8(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _RefusedError("invalid UTF-8", f"byte {error.start}") from None


def _decode(data: bytes) -> str:
    text = _utf8(data)
    if not text.strip():
        raise _RefusedError(HARMLESS)
    return text


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise _RefusedError("nested too deeply") from None
    except ValueError as error:
        raise _RefusedError("not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise _RefusedError("not an object", f"found {type(value).__name__}")
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _refuse_lone_surrogates(fields: dict[str, Any]) -> None:
    """Raises for half of a surrogate pair, which JSON can spell but UTF-8 cannot encode."""
    for key, value in fields.items():
        spelt = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for text in (key, spelt):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise _RefusedError("lone surrogate", f"character {error.start} of {key!r}") from None


def _text_of(value: dict[str, Any], key: str) -> str:
    if key not in value:
        raise _RefusedError("key missing", repr(key))
    text = value[key]
    if not isinstance(text, str):
        raise _RefusedError("not a string", f"{key!r} is {type(text).__name__}")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is beyond the largest number")
    return value


def lines_before(span: Span) -> int:
    """Number of lines, or rows of parquet, that start before a span, to offset its line numbers. Raises DataError."""
    if span.start == 0:
        return 0
    with open_input(Path(span.path), remedy="check --input") as file:
        if content_suffix(span.path) == PARQUET:
            groups = require("pyarrow.parquet", span.path).ParquetFile(file).metadata
            return sum(groups.row_group(k).num_rows for k in range(span.start))
        count, left = 1, span.start - 1  # the byte before the span ends no line, or the last one that starts before it
        while left and (block := file.read(min(left, _BUFFER_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def iterate_texts(
    paths: Sequence[Path], keys: Sequence[str], *, limit_bytes: int, bad_lines: Counter[str]
) -> Iterator[str]:
    """Yields every text of the files to train a tokenizer; counts bad lines in `bad_lines`, by kind.

    Raises:
        DataError, ConfigError: as `Reader`.
    """
    for path in paths:
        for item in Reader(whole(path), keys, limit_bytes=limit_bytes):
            if isinstance(item, Document):
                yield from item.texts
            else:
                bad_lines[item.kind] += 1
