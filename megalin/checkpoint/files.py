"""Files on a shared file system: written whole or not at all, opened without following links, locked by one owner."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import socket
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading; raises OSError for a symlink, a directory or a FIFO (which would block)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def write_new(path: Path, data: bytes) -> None:
    """Creates `path` (an error if it exists) and returns when its bytes are on the disk."""
    with open(path, "xb") as file:
        file.write(data)
        sync(file)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`: after a crash the old or the new content is there, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            sync(file)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync(file: BinaryIO) -> None:
    """Flushes a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes creations and renames in a directory last over a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a directory tree, or a link itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


class FolderInUseError(Exception):
    """A lock that a live process holds; the text names it: pid, host, since when."""


class FolderLock:
    """An exclusive lock on a file, which the kernel gives back when its owner dies, however it dies.

    The file stays: removing a lock file lets two owners in. A child made by fork shares the lock until it calls
    `forget` or exits.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock. Raises FolderInUseError (held by a live process) or OSError."""
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(self._descriptor)
            os.close(self._descriptor)
            raise FolderInUseError(owner or "a process that did not leave its name") from None
        except OSError:
            os.close(self._descriptor)
            raise
        self.previous_owner = _owner(self._descriptor)
        """Who died while holding the lock, or None after an orderly release."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Gives the lock back; harmless when it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self.close()

    def close(self) -> None:
        """Closes this process's copy only: what a child made by fork does, lest it keep the lock of a dead parent."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _owner(descriptor: int) -> str | None:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return f"pid {int(record['pid'])} on {str(record['host'])!r} since {str(record['since'])!r}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
