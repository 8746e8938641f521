"""The manifest of a checkpoint, written last: size and sha256 of every file, for verification."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from megalin.checkpoint.index import FILE_NAME_PATTERN, INDEX_FILE, Index, first_problem, parse_index
from megalin.config import Config
from megalin.errors import CheckpointError
from megalin.files import FileTooLargeError, open_regular, read_limited
from megalin.structured_text import parse_json

MANIFEST_FILE = "manifest.json"
STATE_FILE = "train_state.json"
JSON_LIMIT_BYTES = 1 << 28
"""Largest JSON file of a checkpoint; larger ones are refused unread."""

_HASH_THREADS = min(8, os.cpu_count() or 1)
_FileName = Annotated[str, pydantic.Field(pattern=FILE_NAME_PATTERN)]


class FileRecord(Config):
    """Expected size and digest of a file."""

    size: int = pydantic.Field(ge=0)
    """Bytes."""

    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of its bytes, in lower-case hexadecimal."""

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        """The record of a file with the content `data`."""
        return cls(size=len(data), sha256=hashlib.sha256(data).hexdigest())


class CheckpointManifest(Config):
    """Content of manifest.json."""

    format: Literal[1] = 1
    """Version of this layout."""

    step: int = pydantic.Field(ge=0)
    """Finished optimizer steps; must match the directory's name."""

    files: dict[_FileName, FileRecord]
    """By name; every file except the manifest."""


class Checkpoint:
    """A published checkpoint with a verified manifest.

    Attributes:
        stamp: `files_stamp` when its files were hashed; empty where they were not.
    """

    def __init__(self, path: Path, manifest: CheckpointManifest, stamp: str = "") -> None:
        self.path, self.stamp = path, stamp
        self.manifest = manifest
        self.step = manifest.step

    def state(self) -> dict[str, Any]:
        """The JSON state saved with the tensors. Raises CheckpointError if the file is no longer intact."""
        try:
            state = parse_json(self._read(STATE_FILE))
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path / STATE_FILE}: not JSON: {error}") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.path / STATE_FILE}: not a JSON object")
        return state

    def index(self) -> Index:
        """The index of the tensors; its chunks are in files of the manifest. Raises CheckpointError if invalid."""
        source = str(self.path / INDEX_FILE)
        index = parse_index(self._read(INDEX_FILE), source)
        files = {chunk.file for record in index.tensors.values() for chunk in record.chunks}
        if unknown := sorted(files - self.manifest.files.keys()):
            raise CheckpointError(f"{source}: names files that are not in {MANIFEST_FILE}: {', '.join(unknown)}")
        return index

    def _read(self, name: str) -> bytes:
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{self.path}: {name} is not in {MANIFEST_FILE}; this checkpoint is incomplete")
        data = read_json_bytes(self.path / name)
        if FileRecord.of(data) != record:
            raise CheckpointError(f"{self.path / name}: changed since the checkpoint was verified")
        return data


def step_directory(step: int) -> str:
    """Directory name of a step."""
    return f"step-{step:08d}"


def directory_step(name: str) -> int | None:
    """Parses the step from a checkpoint directory's name; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", name)
    step = int(match[1]) if match else None
    return step if step is not None and step_directory(step) == name else None


def read_json_bytes(path: Path) -> bytes:
    """Reads a JSON file of a checkpoint. Raises CheckpointError if it is unreadable, a link or too large."""
    try:
        return read_limited(path, limit_bytes=JSON_LIMIT_BYTES, follow_links=False)
    except FileTooLargeError:
        raise CheckpointError(
            f"{path}: larger than {JSON_LIMIT_BYTES} bytes, the limit for JSON in a checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_manifest(directory: Path) -> CheckpointManifest:
    """Reads the manifest of a checkpoint directory; the files are not checked yet.

    Raises:
        CheckpointError: the directory is a link, or the manifest is missing, malformed or of another step.
    """
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory (links are refused)")
    path = directory / MANIFEST_FILE
    try:
        manifest = CheckpointManifest.model_validate_json(read_json_bytes(path))
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{path}: not a manifest: {first_problem(error)}") from None
    if step_directory(manifest.step) != directory.name:
        raise CheckpointError(f"{path}: is of step {manifest.step}, which belongs in {step_directory(manifest.step)}")
    return manifest


def files_stamp(directory: Path) -> str:
    """sha256, in hex, of inode, size and times of the files of a directory: equal for processes that find the very same
    files there, unchanged in between. Empty if the directory cannot be read."""
    try:
        with os.scandir(directory) as entries:
            stats = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
    except OSError:
        return ""
    files = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def file_problems(
    directory: Path,
    manifest: CheckpointManifest,
    *,
    part: int = 0,
    num_parts: int = 1,
    on_file: Callable[[], None] | None = None,
) -> list[str]:
    """Checks the files of `manifest`: lists those that are missing or differ in size or bytes.

    Each of several ranks checks its own part. Hashing runs in threads (about 2 GB/s each); with `on_file`, which is
    called after each file, in one, as training needs the others.
    """
    records = sorted(manifest.files.items(), key=lambda entry: (-entry[1].size, entry[0]))[part::num_parts]
    with ThreadPoolExecutor(_HASH_THREADS if on_file is None else 1) as pool:
        problems = []
        for problem in pool.map(lambda entry: _file_problem(directory / entry[0], entry[1]), records):
            problems += [] if problem is None else [problem]
            if on_file is not None:
                on_file()
        return problems


def _file_problem(path: Path, record: FileRecord) -> str | None:
    try:
        with open_regular(path, follow_links=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                return f"{path}: {size} bytes, but {record.size} in {MANIFEST_FILE}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path}: does not exist, but {MANIFEST_FILE} lists it"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    if digest != record.sha256:
        return f"{path}: sha256 differs from {MANIFEST_FILE}: the file has changed"
    return None
