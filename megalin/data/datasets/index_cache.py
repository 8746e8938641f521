"""Disk cache of index arrays, keyed by a hash of their inputs: built once, published atomically, verified, mapped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalin.errors import DataError
from megalin.files import NO_LOCKS, open_regular, read_limited, storage_errors, sync, write_new

_KEY_NAME, _DIGESTS_NAME = "key.json", "digests.json"
_MAX_BYTES = 1 << 24
"""Largest file of a key or of digests."""

_log = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]


def digest_of(array: npt.NDArray[Any]) -> str:
    """sha256, in hex, of an array's bytes, for a key."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def cached(folder: Path, key: Mapping[str, Any], build: Callable[[], Mapping[str, npt.NDArray[Any]]]) -> Arrays:
    """The arrays of `build`, memory-mapped from the folder for `key` in `folder`; built if it does not exist, or if its
    files do not have the digests that were stored with them.

    A new folder gets its name when all of it is on the disk. Processes that need the same arrays at once, also on other
    hosts of the file system, wait for the one that builds them; if it dies, the next one builds. On file systems
    without locks each process builds, and the first result is kept.

    Args:
        key: everything that determines the arrays, as JSON: digests of the inputs, parameters, a version.

    Raises:
        StorageError: the folder cannot be written.
        DataError: the cached folder is damaged again as soon as it was built.
        As `build` does.
    """
    text = json.dumps(key, sort_keys=True, indent=1)
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    if _problem(target, text):
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _build_lock(target) as locked:
            if problem := _problem(target, text):
                if target.exists():
                    _log.warning("%s: the cached index is damaged (%s); it is built again", target, problem)
                    _set_aside(target)
                _publish(target, text, build(), locked=locked)
                if problem := _problem(target, text):
                    raise DataError(
                        f"{target}: the cached index is damaged ({problem}), just after it was built; check the disk"
                    )
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(target.glob("*.npy"))}


@contextmanager
def _build_lock(target: Path) -> Iterator[bool]:
    """Waits for the lock of `target`; yields False if the file system has no locks."""
    path = target.with_suffix(".lock")
    with storage_errors(path):
        file = path.open("wb")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            yield False
            return
        yield True


def _publish(target: Path, text: str, arrays: Mapping[str, npt.NDArray[Any]], *, locked: bool) -> None:
    if locked:  # leftovers of a killed builder
        for left in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(left)
    temporary = target.parent / f".{target.name}.{socket.gethostname()}.{os.getpid()}"
    with storage_errors(target):
        temporary.mkdir()
        try:
            digests = {}
            for name, array in arrays.items():
                path = temporary / f"{name}.npy"
                with path.open("w+b") as file:
                    np.save(file, array, allow_pickle=False)
                    sync(file)
                    file.seek(0)
                    digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
            write_new(temporary / _DIGESTS_NAME, json.dumps(digests).encode("utf-8"))
            write_new(temporary / _KEY_NAME, text.encode("utf-8"))
            temporary.rename(target)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            # Without locks another process may have published the same arrays meanwhile.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _set_aside(target: Path) -> None:
    """Removes a damaged folder, of which another process may have the files mapped."""
    aside = target.parent / f".{target.name}.damaged.{socket.gethostname()}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError), storage_errors(target):
        target.rename(aside)
        shutil.rmtree(aside)


def _problem(target: Path, text: str) -> str:
    """Defect of the folder: missing, of another key, or other files than those that were published; empty if none."""
    if not target.exists():
        return "missing"
    try:
        if _read_small(target / _KEY_NAME) != text.encode("utf-8"):
            return "another key"
        digests = dict(json.loads(_read_small(target / _DIGESTS_NAME)))
        if sorted(digests) != sorted(path.name for path in target.glob("*.npy")):
            return "other files"
        for name, digest in digests.items():
            with open_regular(target / name, follow_links=False) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{name} has other bytes than when it was built"
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return str(error)
    return ""


def _read_small(path: Path) -> bytes:
    return read_limited(path, limit_bytes=_MAX_BYTES, follow_links=False)
