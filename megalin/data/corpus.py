"""Text corpora: documents out of jsonl and plain text, in constant memory, with every bad line told by kind."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn

from megalin.data.files import open_regular
from megalin.errors import DataError

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
# A blank line is counted with the others, but is no reason to stop.
HARMLESS: BadKind = "blank line"
DEFAULT_DOCUMENT_BYTES = 16 << 20

_JSON_LINES = (".jsonl", ".json")
_PLAIN = ".txt"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RawDocument(NamedTuple):
    """The bytes of one line of jsonl or of one text file; None where they pass the limit."""

    path: str
    line: int  # from 1; 1 for a text file
    data: bytes | None


class Documents(NamedTuple):
    """The text of one raw document, by key."""

    texts: tuple[str, ...]


class BadLine(NamedTuple):
    """A line that gave no document."""

    path: str
    line: int
    kind: BadKind
    detail: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}{': ' if self.detail else ''}{self.detail}"


def expand_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files of `patterns` (paths or globs) in their order, those of a glob sorted, each once.

    Raises:
        DataError: a pattern without a match, or a file that is neither .jsonl, .json nor .txt.
    """
    paths: dict[Path, None] = {}
    for pattern in patterns:
        # A file may bear brackets in its name, so a path that exists is no glob.
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f"--input {pattern}: no such file, and no file matches it as a glob")
        paths.update((Path(name), None) for name in found)
    for path in paths:
        if path.suffix not in (*_JSON_LINES, _PLAIN):
            raise DataError(
                f"{path}: expected .jsonl or .json (one JSON object a line) or .txt (one document a file); "
                "convert or decompress it first"
            )
    return list(paths)


def read_raw(path: Path, *, limit_bytes: int) -> Iterator[RawDocument]:
    """The documents of a file before decoding, at most `limit_bytes` in memory: jsonl by line, .txt as a whole.

    Raises:
        DataError: the file is missing, no regular file, or fails while it is read.
    """
    with open_regular(path, remedy="check --input") as raw, open(raw.fileno(), "rb", closefd=False) as file:
        try:
            if path.suffix == _PLAIN:
                data = file.read(limit_bytes + 1)
                yield RawDocument(str(path), 1, data if len(data) <= limit_bytes else None)
                return
            for number, line in enumerate(_lines(file, limit_bytes), start=1):
                yield RawDocument(str(path), number, line)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; check the disk and --input") from None


def _lines(file: BinaryIO, limit_bytes: int) -> Iterator[bytes | None]:
    """Lines without their end; None for one of more than `limit_bytes`, of which the rest is skipped in pieces."""
    while piece := file.readline(limit_bytes + 2):  # two more, so that a line at the limit keeps its CR LF
        line: bytes | None = piece.rstrip(b"\r\n")
        if line and len(line) > limit_bytes:
            line = None
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(limit_bytes + 2)
            if piece.rstrip(b"\r\n"):
                line = None
        yield line


class _RefusedError(Exception):
    def __init__(self, kind: BadKind, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


def parse_raw(raw: RawDocument, keys: Sequence[str], *, limit_bytes: int) -> Documents | BadLine:
    """Decodes a raw document: the strings under `keys` of a JSON object, or a text file's text under the only key."""
    try:
        if raw.data is None:
            raise _RefusedError("too long", f"more than {limit_bytes} bytes")
        text = _decode(raw.data.removeprefix(_BYTE_ORDER_MARK) if raw.line == 1 else raw.data)
        if Path(raw.path).suffix == _PLAIN:
            return Documents((text,))
        value = _parse_object(text)
        return Documents(tuple(_text_of(value, key) for key in keys))
    except _RefusedError as refusal:
        return BadLine(raw.path, raw.line, refusal.kind, refusal.detail)


def _decode(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _RefusedError("invalid UTF-8", f"byte {error.start}") from None
    if not text.strip():
        raise _RefusedError(HARMLESS)
    return text


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _RefusedError("nested too deeply") from None
    except ValueError as error:
        raise _RefusedError("not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise _RefusedError("not an object", f"found {type(value).__name__}")
    return value


def _text_of(value: dict[str, Any], key: str) -> str:
    if key not in value:
        raise _RefusedError("key missing", repr(key))
    text = value[key]
    if not isinstance(text, str):
        raise _RefusedError("not a string", f"{key!r} is {type(text).__name__}")
    try:
        text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no UTF-8 text holds
    except UnicodeEncodeError as error:
        raise _RefusedError("lone surrogate", f"character {error.start} of {key!r}") from None
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def iterate_texts(paths: Sequence[Path], keys: Sequence[str], *, limit_bytes: int) -> Iterator[str]:
    """Every text of the files, bad lines left out: what a tokenizer is trained on. Raises DataError as `read_raw`."""
    for path in paths:
        for raw in read_raw(path, limit_bytes=limit_bytes):
            parsed = parse_raw(raw, keys, limit_bytes=limit_bytes)
            if isinstance(parsed, Documents):
                yield from parsed.texts
