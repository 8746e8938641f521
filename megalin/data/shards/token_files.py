"""Token files of other systems: nanoGPT, llm.c, NumPy and datatrove, validated on open and read on demand."""

from __future__ import annotations

import io
import struct
import tokenize
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from megalin.data.shards.index_file import MAX_SEQUENCES, refuse
from megalin.errors import ConfigError, DataError
from megalin.files import open_input, read_input, read_range

Format = Literal["raw", "llm.c", "npy", "datatrove"]
RAW_DTYPES = ("uint16", "uint32", "int32", "int64")
"""Dtypes of raw files, nanoGPT's first."""
_REMEDY = "check --input"
_HEADER_INTEGERS = 256
_HEADER_BYTES = 4 * _HEADER_INTEGERS
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Magic of llm.c's and modded-nanogpt's files: version and dtype of the tokens (GPT-2, LLaMA 3)."""
_LLM_C_EVALUATION = 20240522
_NPY = b"\x93NUMPY"
_METADATA_BYTES = 1 << 16
_OTHERS = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80\x02\x8a\x0al\xfc\x9cF\xf9": "a pickle of an older torch.save",
    b"\x1f\x8b\x08": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\xfd7zXZ\x00": "an xz file",
    b"MMIDIDX\x00\x00": "a Megatron index (.idx)",
    b"GGUF": "a GGUF model",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
}
"""First bytes of files that have no tokens; raw files have no first bytes of their own."""


class TokenFile:
    """A token file of another system.

    Attributes:
        path: of the file.
        format: its system.
        dtype: of the tokens, little or big endian.
        num_tokens: their number.
        ends: [D] int64, the position after each document's last token, or None for formats without an index.

    A context manager, which closes its files.
    """

    def __init__(self, path: Path, form: Format | None = None, dtype: str | None = None) -> None:
        """Opens and validates `path`.

        Args:
            form: None: by its first bytes, else by its name: .ds is datatrove's, .bin raw.
            dtype: one of RAW_DTYPES, for raw files; None: uint16.

        Raises:
            DataError: the file is missing, truncated, of another format, or without tokens and an index that says so.
            ConfigError: a dtype for a format that has its own, or a name without a known format.
        """
        self.path = path
        self.ends: npt.NDArray[np.int64] | None = None
        self._loss: tuple[Path, io.FileIO] | None = None
        with ExitStack() as stack:
            self._opened = stack
            self._file = stack.enter_context(open_input(path, remedy=_REMEDY))
            self._bytes = self._file.seek(0, 2)
            self.format = form or self._detected()
            if dtype is not None and self.format != "raw":
                raise ConfigError(f"{path}: the format {self.format} has its own dtype; leave --dtype {dtype} out")
            self.dtype, self._offset = np.dtype(dtype or RAW_DTYPES[0]).newbyteorder("<"), 0
            {
                "raw": self._open_raw,
                "llm.c": self._open_llm_c,
                "npy": self._open_npy,
                "datatrove": self._open_datatrove,
            }[self.format]()
            self.num_tokens = (self._bytes - self._offset) // self.dtype.itemsize
            if not self.num_tokens and self.ends is None:  # a process of datatrove without documents has an empty file
                refuse(path, "tokens", f"none in {self._bytes} bytes")
            self._opened = stack.pop_all()

    def read(self, position: int, count: int) -> npt.NDArray[Any]:
        """Reads tokens [position, position + count), [count] of `dtype`. Raises DataError."""
        assert 0 <= position <= position + count <= self.num_tokens, (position, count, self.num_tokens)
        size = self.dtype.itemsize
        start = self._offset + position * size
        return np.frombuffer(read_range(self._file, self.path, start, count * size, file_bytes=self._bytes), self.dtype)

    @property
    def has_label_mask(self) -> bool:
        """True where the file says which tokens count as labels (datatrove's .loss)."""
        return self._loss is not None

    def read_label_mask(self, position: int, count: int) -> npt.NDArray[np.bool_]:
        """Reads whether tokens [position, position + count) count as labels, [count]; all do without a mask."""
        if self._loss is None:
            return np.ones(count, np.bool_)
        path, file = self._loss
        return np.frombuffer(read_range(file, path, position, count, file_bytes=self.num_tokens), np.uint8) != 0

    def blocks(self, size: int) -> Iterator[npt.NDArray[Any]]:
        """Yields all tokens, at most `size` at a time."""
        for first in range(0, self.num_tokens, size):
            yield self.read(first, min(size, self.num_tokens - first))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _first(self, count: int) -> bytes:
        return bytes(read_range(self._file, self.path, 0, min(count, self._bytes), file_bytes=self._bytes))

    def _detected(self) -> Format:
        first = self._first(len(_NPY))
        if first == _NPY:
            return "npy"
        if len(first) >= 4 and struct.unpack_from("<i", first)[0] in (*_LLM_C, _LLM_C_EVALUATION):
            return "llm.c"
        if self.path.suffix == ".ds":
            return "datatrove"
        if self.path.suffix != ".bin":
            raise ConfigError(f"{self.path}: neither .bin nor .ds, .npy or llm.c's; name its format with --format")
        if (index := self.path.with_suffix(".idx")).exists():
            raise DataError(
                f"{self.path}: belongs to {index}, so it is a Megatron shard already; give its prefix to data.train"
            )
        if other := next((name for magic, name in _OTHERS.items() if self._first(len(magic)) == magic), None):
            raise DataError(f"{self.path}: begins as {other}, not as raw tokens; give --format raw if it has tokens")
        return "raw"

    def _open_raw(self) -> None:
        if self._bytes % self.dtype.itemsize:
            expected = f"a multiple of {self.dtype.itemsize} bytes, for tokens of {self.dtype.name}"
            refuse(self.path, expected, f"{self._bytes} bytes; truncated, or of another dtype")

    def _open_llm_c(self) -> None:
        if self._bytes < _HEADER_BYTES:
            refuse(self.path, f"a header of {_HEADER_BYTES} bytes", f"a file of {self._bytes} bytes")
        magic, version, count = struct.unpack_from("<3i", self._first(12))
        if magic == _LLM_C_EVALUATION:
            raise DataError(f"{self.path}: an evaluation file of llm.c (HellaSwag), which has no documents")
        if magic not in _LLM_C:
            refuse(self.path, f"the magic {' or '.join(map(str, _LLM_C))}", str(magic))
        expected, dtype = _LLM_C[magic]
        if version != expected:
            refuse(self.path, f"version {expected} of the format {magic}", str(version))
        self.dtype, self._offset = np.dtype(dtype).newbyteorder("<"), _HEADER_BYTES
        self._check_size(count)

    def _open_npy(self) -> None:
        self._file.seek(0)
        try:
            version = np.lib.format.read_magic(self._file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read is None:
                refuse(self.path, "version 1.0 or 2.0 of the .npy format", ".".join(map(str, version)))
            shape, _, self.dtype = read(self._file)
        except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
            raise DataError(f"{self.path}: not a .npy file, or damaged: {repr(error)[:200]}") from None
        if self.dtype.kind not in "iu" or len(shape) != 1:
            found = f"{self.dtype} {list(shape)}"
            refuse(self.path, "integers of one dimension, as array.reshape(-1) has", found)
        self._offset = self._file.tell()
        self._check_size(shape[0])

    def _check_size(self, count: int) -> None:
        expected = self._offset + count * self.dtype.itemsize
        if count < 0 or self._bytes != expected:
            tokens = f"{expected} bytes for {count} tokens of {self.dtype.name}, as its header says"
            refuse(self.path, tokens, f"{self._bytes} bytes; truncated, or damaged")

    def _open_datatrove(self) -> None:
        path = self.path.with_name(f"{self.path.name}.index")
        with open_input(path, remedy="it has the documents' ends; copy it too, or give --format raw") as file:
            size = file.seek(0, 2)
            if size % 8 or size > 8 * MAX_SEQUENCES:
                refuse(path, f"8 bytes a document, of at most {MAX_SEQUENCES}", f"{size} bytes; truncated")
            ends = np.frombuffer(read_range(file, path, 0, size, file_bytes=size), np.dtype("<u8"))
        last = int(ends[-1]) if ends.size else 0
        width = next((width for width in (2, 4) if last * width == self._bytes), None)
        if width is None:
            refuse(self.path, f"2 or 4 bytes for each of the {last} tokens of {path.name}", f"{self._bytes} bytes")
        if bool((ends[1:] < ends[:-1]).any()):
            bad = int(np.flatnonzero(ends[1:] < ends[:-1])[0])
            refuse(path, f"ends in ascending order, so at least {ends[bad]} in entry {bad + 1}", str(ends[bad + 1]))
        self._check_metadata(width, last)
        self.dtype, self.ends = np.dtype(f"<u{width}"), ends.astype(np.int64)
        loss = self.path.with_name(f"{self.path.name}.loss")
        if loss.exists():
            self._loss = loss, self._opened.enter_context(open_input(loss, remedy=_REMEDY))
            if (size := self._loss[1].seek(0, 2)) != last:
                refuse(loss, f"{last} bytes, one a token of {self.path.name}", f"{size} bytes")

    def _check_metadata(self, width: int, count: int) -> None:
        """Compares the metadata, if there are any: "tokenizer|bytes a token", the number of tokens."""
        path = self.path.with_name(f"{self.path.name}.metadata")
        if not path.exists():
            return
        lines = read_input(path, limit_bytes=_METADATA_BYTES, remedy=_REMEDY).decode("utf-8", "replace").splitlines()
        named = lines[0].rpartition("|")[2] if lines and "|" in lines[0] else str(width)
        found = [named, lines[1] if len(lines) > 1 else ""]
        if found != [str(width), str(count)]:
            refuse(path, f"{width} bytes a token and {count} tokens, as {self.path.name} has", " and ".join(found))
