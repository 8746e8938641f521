"""Disk cache of index arrays, keyed by a hash of their inputs: built once, published atomically, memory-mapped."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
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
from megalin.files import NO_LOCKS, storage_errors, sync, write_new

_KEY_NAME = "key.json"

Arrays = dict[str, npt.NDArray[Any]]


def digest_of(array: npt.NDArray[Any]) -> str:
    """sha256, in hex, of an array's bytes, for a key."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def cached(folder: Path, key: Mapping[str, Any], build: Callable[[], Mapping[str, npt.NDArray[Any]]]) -> Arrays:
    """The arrays of `build`, memory-mapped from the folder for `key` in `folder`; built if it does not exist.

    A new folder gets its name when all of it is on the disk. Processes that need the same arrays at once, also on other
    hosts of the file system, wait for the one that builds them; if it dies, the next one builds. On file systems
    without locks each process builds, and the first result is kept.

    Args:
        key: everything that determines the arrays, as JSON: digests of the inputs, parameters, a version.

    Raises:
        StorageError: the folder cannot be written.
        DataError: the cached folder is damaged.
        As `build` does.
    """
    text = json.dumps(key, sort_keys=True, indent=1)
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    if not target.exists():
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _build_lock(target) as locked:
            if not target.exists():
                _publish(target, text, build(), locked=locked)
    return _load(target, text)


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
            for name, array in arrays.items():
                with (temporary / f"{name}.npy").open("wb") as file:
                    np.save(file, array, allow_pickle=False)
                    sync(file)
            write_new(temporary / _KEY_NAME, text.encode("utf-8"))
            temporary.rename(target)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            # Without locks another process may have published the same arrays meanwhile.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _load(target: Path, text: str) -> Arrays:
    try:
        if (target / _KEY_NAME).read_text(encoding="utf-8") != text:
            raise DataError(f"{target}: the cached index has another key; remove this folder")
        files = sorted(target.glob("*.npy"))
        return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in files}
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{target}: the cached index is damaged ({error}); remove this folder, and it is built again"
        ) from None
