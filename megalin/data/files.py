"""Opening untrusted files and publishing finished ones: regular files only, size limits, temporary name then rename."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from megalin.errors import DataError, StorageError

# File systems that know no locks (some network mounts) answer with one of these.
NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)


def open_regular(path: Path, *, remedy: str) -> FileIO:
    """Opens `path` for unbuffered reading. Raises DataError when it is missing, unreadable or no regular file."""
    try:
        # Without O_NONBLOCK the open of a named pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read by user {os.getuid()}: {error.strerror}; {remedy}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path}: expected a regular file, found a folder, pipe or device; {remedy}")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_limited(path: Path, *, limit_bytes: int, remedy: str) -> bytes:
    """The whole of a regular file of at most `limit_bytes`. Raises DataError, also when it is longer."""
    with open_regular(path, remedy=remedy) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise DataError(f"{path}: expected at most {limit_bytes} bytes, found {size}; {remedy}")
        return file.read(limit_bytes)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; check the folder, its permissions and the free space"
        ) from error


def open_temporary(path: Path) -> BinaryIO:
    """Opens the empty, locked temporary file of `path` for writing; what a killed writer left there is replaced.

    Raises:
        StorageError: when the folder cannot be written, or another process is writing the same file.
    """
    temporary = temporary_name(path)
    with storage_errors(temporary):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.fdopen(os.open(temporary, flags, 0o666), "r+b", buffering=1 << 20)
        try:
            _lock(file, temporary)
            os.ftruncate(file.fileno(), 0)
        except BaseException:
            file.close()
            raise
    return file


def _lock(file: BinaryIO, path: Path) -> None:
    busy = f"{path}: another process is writing it; wait for it to end or choose another output"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StorageError(busy) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    # The other writer may have renamed the file between our open and our lock: then it is published, not ours.
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise StorageError(busy)


def temporary_name(path: Path) -> Path:
    """The name under which `path` is written: same folder, so that the rename is atomic."""
    return path.with_name(path.name + ".tmp")


def publish(file: BinaryIO, path: Path) -> None:
    """Makes the temporary `file` durable and gives it its name `path`. Raises StorageError."""
    with storage_errors(path):
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary_name(path), path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old or the new content, never a part. Raises StorageError."""
    with open_temporary(path) as file:
        with storage_errors(path):
            file.write(text.encode("utf-8"))
        publish(file, path)
