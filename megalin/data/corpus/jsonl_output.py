"""Output of a corpus as jsonl: one atomic file per part, and a manifest written last."""

from __future__ import annotations

import glob
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from megalin.data.corpus.parts import CorpusPart, discard
from megalin.errors import ConfigError
from megalin.files import open_temporary, publish, storage_errors, temporary_name, write_text
from megalin.optional import require

Compression = Literal["none", "gz", "zst"]
_FRAME_BYTES = 4 << 20  # compressed at a time; a file is a sequence of such frames


class JsonLinesWriter:
    """Writes objects, one a line, to a file that is published when the context ends without error; deterministic."""

    def __init__(self, path: Path, compression: Compression = "none") -> None:
        """Opens the temporary file. Raises StorageError; ConfigError where a library is missing."""
        self.path, self.compression = path, compression
        self._codec = require("pyarrow", f"{path}: writing .zst").Codec("zstd") if compression == "zst" else None
        self._pending = bytearray()
        self._file = open_temporary(path)

    def write(self, value: Mapping[str, Any]) -> None:
        """Appends a line. Raises StorageError; ValueError for a float that is not finite, which JSON cannot hold."""
        line = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._pending += line.encode("utf-8") + b"\n"
        if len(self._pending) >= _FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        data = bytes(self._pending)
        self._pending.clear()
        if self.compression == "gz":
            data = gzip.compress(data, compresslevel=6, mtime=0)
        elif self._codec is not None:
            data = self._codec.compress(data, asbytes=True)
        with storage_errors(self.path):
            self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is not None:
                temporary_name(self.path).unlink(missing_ok=True)
                return
            self._flush()
            publish(self._file, self.path)


def part_path(folder: Path, part: CorpusPart, compression: Compression) -> Path:
    """Path of a part's lines until all parts are complete."""
    return folder / f"{part.number:06}{_suffix(compression)}"


def _suffix(compression: Compression) -> str:
    return ".jsonl" if compression == "none" else f".jsonl.{compression}"


def _manifest_path(prefix: str) -> Path:
    return Path(f"{prefix}.manifest.json")


def check_free(prefix: str, *, resume: bool) -> None:
    """Raises ConfigError where a corpus of this name exists.

    A run that was stopped while publishing leaves some of its files: `resume` is allowed while `<prefix>.parts`
    exists, which is removed last.
    """
    if resume and Path(f"{prefix}.parts").exists():
        return
    existing = [
        *glob.glob(f"{glob.escape(prefix)}-*-of-*.jsonl*"),
        *map(str, filter(Path.exists, [_manifest_path(prefix)])),
    ]
    if existing:
        raise ConfigError(f"--output-prefix {prefix}: {existing[0]} exists; remove that corpus or give another prefix")


def publish_parts(
    prefix: str, folder: Path, parts: Sequence[CorpusPart], compression: Compression, manifest: Mapping[str, Any]
) -> list[str]:
    """Renames the parts' files to `<prefix>-00000-of-00025.jsonl`, writes the manifest, then removes `folder`.

    Raises:
        StorageError: a file cannot be renamed or written.
    """
    names = [f"{prefix}-{part.number:05}-of-{len(parts):05}{_suffix(compression)}" for part in parts]
    for part, name in zip(parts, names, strict=True):
        source = part_path(folder, part, compression)
        if source.exists():  # else an earlier run was stopped after renaming it
            with storage_errors(Path(name)):
                os.replace(source, name)
    write_text(_manifest_path(prefix), json.dumps({**manifest, "files": names}, indent=1, ensure_ascii=False) + "\n")
    discard(folder)
    return names
