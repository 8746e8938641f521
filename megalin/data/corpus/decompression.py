"""Decompression of gz, bz2, xz and zst: all streams of a file, in bounded memory; nothing after one is ignored."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from megalin.errors import DataError
from megalin.optional import require

DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of reading a file that is truncated or damaged, or whose disk fails."""
_STORED_BYTES = 1 << 16  # read at a time
_BUFFER_BYTES = 1 << 20
# Dictionary of the decoder. xz -9 needs 65 MiB and zstd --ultra 128 MiB; a header can claim 4 GiB.
_XZ_BYTES = 256 << 20
# Text compresses about ten times; far more means a file made to exhaust its reader (a decompression bomb).
_MAX_EXPANSION = 256
_EXPANSION_FREE_BYTES = 1 << 30


def decompress(raw: BinaryIO, kind: str, path: str) -> io.BufferedReader:
    """Opens the content of `raw`, compressed as `kind` ("gz", "bz2", "xz" or "zst"), for reading.

    The streams of a concatenation follow one another, with the zero bytes that gzip and xz take for padding. Memory: at
    most 256 MiB for the decoder's dictionary.

    Raises, while it is read:
        DataError: content beyond the first GiB that expands more than 256 times.
        OSError, EOFError, zlib.error, lzma.LZMAError: a truncated or damaged stream, an empty file, or bytes between or
            after the streams that are neither a stream nor padding.
        ConfigError: the library for zst is not installed.
    """
    if not raw.read(1):
        raise EOFError("an empty file, without a compressed stream")
    raw.seek(0)
    if kind == "zst":
        # Arrow's reader detects a truncated file; zstandard's does not.
        arrow = require("pyarrow", f"{path}: reading .zst")
        content = arrow.input_stream(raw, compression="zstd", buffer_size=_STORED_BYTES)
    else:
        content = _Streams(raw, kind)
    return io.BufferedReader(_Limited(content, raw, path), _BUFFER_BYTES)


def check_expansion(what: str, expanded: int, stored: int, *, free_bytes: int) -> None:
    """Raises DataError for content of more than `free_bytes` that expands more than 256 times."""
    if expanded > max(free_bytes, _MAX_EXPANSION * stored):
        raise DataError(
            f"{what} expands to {expanded} bytes from {stored}, more than {_MAX_EXPANSION} to 1, which is not text; "
            "check the file, or give it without compression"
        )


class _Decoder(Protocol):
    """Decoder of one stream, as in bz2 and lzma."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int) -> bytes: ...


class _GzipDecoder:
    """zlib's decoder of a gzip member with the interface of those of bz2 and lzma."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def needs_input(self) -> bool:
        return not self._decoder.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, /, max_length: int) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, max_length)


class _Format(NamedTuple):
    start: Callable[[], _Decoder]
    is_padding: Callable[[int, bool], bool]
    """(zero bytes after a stream, True at the end of the file) -> True where the format's own tool skips them."""


_FORMATS = {
    "gz": _Format(_GzipDecoder, lambda _, at_end: at_end),
    "bz2": _Format(bz2.BZ2Decompressor, lambda _, __: False),
    "xz": _Format(
        lambda: lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_BYTES), lambda zeros, _: zeros % 4 == 0
    ),
}


class _Streams(io.RawIOBase):
    """Content of consecutive streams."""

    def __init__(self, raw: BinaryIO, kind: str) -> None:
        self._raw, self._format = raw, _FORMATS[kind]
        self._decoder, self._stored = self._format.start(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._decoder.eof or self._next_stream():
            data = self._decoder.decompress(self._input(), max_length=len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _input(self) -> bytes:
        if not self._decoder.needs_input:
            return b""
        data, self._stored = self._stored or self._raw.read(_STORED_BYTES), b""
        if not data:
            raise EOFError("the file ends inside of a compressed stream")
        return data

    def _next_stream(self) -> bool:
        """Skips the padding after a stream and starts the next one; False at the end of the file."""
        rest, zeros = self._decoder.unused_data, 0
        while rest or (rest := self._raw.read(_STORED_BYTES)):
            self._stored = rest.lstrip(b"\0")
            zeros += len(rest) - len(self._stored)
            if self._stored:
                break
            rest = b""
        if zeros and not self._format.is_padding(zeros, not self._stored):
            raise OSError(f"{zeros} zero bytes after a compressed stream, which is no padding")
        if not self._stored:
            return False
        self._decoder = self._format.start()
        return True


class _Limited(io.RawIOBase):
    """Content of a stream up to the largest expansion."""

    def __init__(self, content: Any, raw: BinaryIO, path: str) -> None:
        self._content, self._raw, self._path = content, raw, path
        self._expanded = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size = cast(int, self._content.readinto(buffer))
        self._expanded += size
        check_expansion(f"{self._path}:", self._expanded, self._raw.tell(), free_bytes=_EXPANSION_FREE_BYTES)
        return size
