"""Input files of a corpus: expansion of --input, formats, and splitting into spans for processes and hosts."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megalin.errors import DataError
from megalin.files import open_input, read_input
from megalin.optional import require

JSON_LINES = (".jsonl", ".json")
PLAIN = ".txt"
PARQUET = ".parquet"
ARROW = (".arrow", ".feather")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_LIST_LIMIT_BYTES = 256 << 20
_DEEPEST_LIST = 4


class Span(NamedTuple):
    """Range of a file for one process: the lines that start in bytes [start, end), or these row groups of parquet.

    A compressed, plain text or Arrow file is one span from 0 to its size, because it is not read from the middle.
    """

    path: str
    start: int
    end: int


def expand_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files of `patterns` in their order, each once: paths, globs (sorted), or @FILE with one pattern a line.

    Raises:
        DataError: a pattern without a match, a bad list, or a file of an unknown kind.
    """
    paths: dict[Path, None] = {}
    for pattern in _listed(patterns, depth=0):
        # A file name may contain brackets, so a path that exists is not a glob.
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f"--input {pattern}: no such file, and no file matches it as a glob")
        paths.update((Path(name), None) for name in found)
    for path in paths:
        content = content_suffix(path)
        columnar = content in (PARQUET, *ARROW)
        if not (content in (*JSON_LINES, PLAIN) or (columnar and not compression(path))):
            raise DataError(
                f"{path}: expected .jsonl or .json (one JSON object a line) or .txt (one document a file), also with "
                ".gz, .bz2, .xz or .zst, or .parquet, .arrow or .feather; convert it first"
            )
    return list(paths)


def _listed(patterns: Sequence[str], *, depth: int) -> Iterator[str]:
    for pattern in patterns:
        if not pattern.startswith("@"):
            yield pattern
            continue
        if depth == _DEEPEST_LIST:
            raise DataError(
                f"--input {pattern}: lists are nested deeper than {_DEEPEST_LIST}; does one refer to itself?"
            )
        remedy = "give @FILE, a list with one path or glob per line"
        data = read_input(Path(pattern[1:]), limit_bytes=_LIST_LIMIT_BYTES, remedy=remedy)
        try:
            names = [line.strip() for line in data.decode("utf-8").splitlines()]
        except UnicodeDecodeError:
            raise DataError(f"{pattern[1:]}: not UTF-8; {remedy}") from None
        yield from _listed([name for name in names if name], depth=depth + 1)


def compression(path: str | Path) -> str | None:
    """Compression of a file, by its name: "gz", "bz2", "xz" or "zst"."""
    suffix = Path(path).suffix
    return suffix[1:] if suffix in _COMPRESSED else None


def content_suffix(path: str | Path) -> str:
    """Suffix that determines the kind of content: the last one except that of a compression."""
    return Path(Path(path).stem if Path(path).suffix in _COMPRESSED else path).suffix


def whole(path: Path) -> Span:
    """Span of a whole file. Raises DataError."""
    return split(path, part_bytes=None)[0]


def split(path: Path, *, part_bytes: int | None) -> list[Span]:
    """Splits a file into spans of about `part_bytes` (None: one span) that cover every line once.

    Raises:
        DataError: the file is missing, not a regular file, or not parquet.
        ConfigError: the file is parquet and pyarrow is not installed.
    """
    with open_input(path, remedy="check --input") as file:
        size = file.seek(0, 2)
        if content_suffix(path) == PARQUET:
            arrow = require("pyarrow", f"{path}: reading parquet")
            try:
                metadata = require("pyarrow.parquet", str(path)).ParquetFile(file).metadata
                groups = [metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups)]
            except (arrow.ArrowException, OSError) as error:
                raise DataError(f"{path}: not a parquet file, or damaged: {error}") from None
            return _row_groups(str(path), groups, part_bytes)
    if part_bytes is None or compression(path) or content_suffix(path) in (PLAIN, *ARROW):
        return [Span(str(path), 0, size)]
    bounds = [*range(0, max(size, 1), part_bytes), size]
    return [Span(str(path), start, end) for start, end in itertools.pairwise(bounds)]


def _row_groups(path: str, sizes: Sequence[int], part_bytes: int | None) -> list[Span]:
    spans, start, held = [], 0, 0
    for group, size in enumerate(sizes, start=1):
        held += size
        if part_bytes is not None and held >= part_bytes:
            spans.append(Span(path, start, group))
            start, held = group, 0
    if start < len(sizes) or not spans:
        spans.append(Span(path, start, len(sizes)))
    return spans
