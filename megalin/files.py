"""Opening, publishing and locking of files: regular files only, size limits, temporary name then rename, fsync."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

from megalin.errors import DataError, StorageError

NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
"""errno values of file systems without locks (some network mounts)."""
_RETRY_SECONDS = (0.1, 1.0)
"""Waits before the second and the third try of a read that failed with an input/output error."""

_log = logging.getLogger(__name__)


class NotRegularFileError(OSError):
    """A folder, pipe or device in the place of a regular file."""


class FileTooLargeError(OSError):
    """A file that is larger than its reader's limit."""


def open_regular(path: Path, *, follow_links: bool) -> io.FileIO:
    """Opens a regular file for unbuffered reading.

    Raises:
        NotRegularFileError: a folder, pipe (never waited for) or device.
        OSError: missing, unreadable, or a symlink without `follow_links`.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    return os.fdopen(_regular(os.open(path, flags), path), "rb", buffering=0)


def open_append(path: Path) -> int:
    """Opens or creates a regular file for appending, never through a link; returns its descriptor.

    Raises:
        NotRegularFileError: a folder or device.
        OSError: it cannot be written, or is a link or a pipe.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return _regular(os.open(path, flags, 0o644), path)


def _regular(descriptor: int, path: Path) -> int:
    """The open descriptor, if it is of a regular file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularFileError(errno.EINVAL, "expected a regular file, found a folder, pipe or device", str(path))
    return descriptor


def read_limited(path: Path, *, limit_bytes: int, follow_links: bool) -> bytes:
    """Reads a whole regular file of at most `limit_bytes`.

    Raises:
        FileTooLargeError: it is longer.
        OSError: as `open_regular`, or a read that fails.
    """
    with io.BufferedReader(open_regular(path, follow_links=follow_links)) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit_bytes else file.read(limit_bytes + 1)  # one more, as it may be growing
    if (size := max(size, len(data))) > limit_bytes:
        raise FileTooLargeError(errno.EFBIG, f"expected at most {limit_bytes} bytes, found {size}", str(path))
    return data


def open_input(path: Path, *, remedy: str) -> io.FileIO:
    """Opens a data file of the user's, following links. Raises DataError, which ends with `remedy`."""
    with _data_errors(path, remedy):
        return open_regular(path, follow_links=True)


def read_input(path: Path, *, limit_bytes: int, remedy: str) -> bytes:
    """Reads a data file of the user's of at most `limit_bytes`. Raises DataError, which ends with `remedy`."""
    with _data_errors(path, remedy):
        return read_limited(path, limit_bytes=limit_bytes, follow_links=True)


def read_range(file: io.FileIO, path: Path, start: int, size: int, *, file_bytes: int) -> bytearray:
    """Reads bytes [start, start + size) of `file`, a data file of the user's that had `file_bytes` when it was opened.

    Not memory-mapped: a mapped file that shrinks or fails kills the process; this raises DataError with its `path`.
    """
    return read_ranges(file, path, [start], [size], file_bytes=file_bytes)


def read_ranges(
    file: io.FileIO, path: Path, starts: Sequence[int], sizes: Sequence[int], *, file_bytes: int
) -> bytearray:
    """Reads several ranges of bytes, one after the other, as `read_range` does one."""
    data = bytearray(sum(sizes))
    view, filled = memoryview(data), 0
    for start, size in zip(starts, sizes, strict=True):
        read_into(file, path, view[filled : filled + size], start, file_bytes=file_bytes)
        filled += size
    return data


def read_into(file: io.FileIO, path: Path, view: memoryview, start: int, *, file_bytes: int) -> None:
    """Fills `view` with the bytes of `file` from `start` on, as `read_range` does."""
    filled = 0
    while filled < len(view):
        part = _read_once(file.fileno(), path, view[filled:], start + filled)
        if part == 0:
            raise DataError(f"{path}: expected {file_bytes} bytes, as on open; found its end at byte {start + filled}")
        filled += part


def _read_once(descriptor: int, path: Path, view: memoryview, offset: int) -> int:
    """One read at `offset`; an input/output error, which may be a network file system's, is tried again twice."""
    for wait in (*_RETRY_SECONDS, None):
        try:
            return os.preadv(descriptor, [view], offset)
        except OSError as error:
            if error.errno != errno.EIO or wait is None:
                tries = f", {len(_RETRY_SECONDS) + 1} times" if error.errno == errno.EIO else ""
                raise DataError(f"{path}: cannot be read at byte {offset}{tries}: {error.strerror}") from None
            _log.warning("%s: cannot be read at byte %d: %s; trying again", path, offset, error.strerror)
            time.sleep(wait)
    raise AssertionError(path)


@contextlib.contextmanager
def _data_errors(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {remedy}") from None
    except (NotRegularFileError, FileTooLargeError) as error:
        raise DataError(f"{path}: {error.strerror}; {remedy}") from None
    except OSError as error:
        remedy = "raise its limit (ulimit -n), or merge files" if error.errno == errno.EMFILE else remedy
        reader = f"user {os.getuid()}{_mode(path)}"
        raise DataError(f"{path}: cannot be read by {reader}: {error.strerror}; {remedy}") from None


def _mode(path: Path) -> str:
    """Mode and owner of a file as text; empty if its folder cannot be searched."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f" (mode {stat.S_IMODE(found.st_mode):03o}, owner {found.st_uid})"


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a StorageError that names `path`."""
    try:
        yield
    except BlockingIOError as error:  # of `_lock`
        raise StorageError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; check the folder, its permissions and the free space"
        ) from error


def temporary_name(path: Path) -> Path:
    """The name under which `path` is written: same folder, so that the rename is atomic."""
    return Path(f"{path}.tmp")  # with_name refuses "." and "/"


def open_temporary(path: Path) -> BinaryIO:
    """Opens the empty, locked temporary file of `path` for writing; a killed writer's leftover is replaced.

    Raises:
        StorageError: the folder cannot be written, or another process is writing the same file.
    """
    temporary = temporary_name(path)
    with storage_errors(temporary):
        return _open_locked(temporary)


def _open_locked(path: Path) -> BinaryIO:
    """Opens `path` for writing, empty and locked. Raises BlockingIOError where another process has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    file = os.fdopen(_regular(descriptor, path), "r+b", 1 << 20)
    try:
        _lock(file, path)
        os.ftruncate(file.fileno(), 0)
    except BaseException:
        file.close()
        raise
    return file


def _lock(file: BinaryIO, path: Path) -> None:
    busy = "another process is writing it; wait for it to end or choose another output"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(errno.EWOULDBLOCK, busy) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    # The other writer may have renamed the file between our open and our lock: then it is published, not ours.
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise BlockingIOError(errno.EWOULDBLOCK, busy)


def publish(file: BinaryIO, path: Path) -> None:
    """Makes the temporary `file` durable and renames it to `path`. Raises StorageError."""
    with storage_errors(path):
        _publish(file, path)


def _publish(file: BinaryIO, path: Path) -> None:
    sync(file)
    os.replace(temporary_name(path), path)
    sync_directory(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`: readers, also after a crash, find the old or the new content, never a mix.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: it cannot be written; the old content stays, and no temporary file.
    """
    temporary = temporary_name(path)
    with _open_locked(temporary) as file:
        try:
            file.write(data)
            _publish(file, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """`write_atomically` of a text in UTF-8. Raises StorageError."""
    with storage_errors(path):
        write_atomically(path, text.encode("utf-8"))


def write_new(path: Path, data: bytes) -> None:
    """Creates `path` (an error if it exists) and returns when its bytes are on the disk."""
    with open(path, "xb") as file:
        file.write(data)
        sync(file)


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


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Waits for, and holds, an exclusive lock on a file, for a short change of other files. Where the file system has
    no locks there is none. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


class FolderInUseError(Exception):
    """A lock that a live process holds; the text names it: pid, host, since when."""


_OWNER_BYTES = 4096
"""Most bytes of a lock's file."""


class FolderLock:
    """An exclusive lock on a file, which the kernel releases when its owner dies, however it dies.

    The file stays as long as its folder; its owner alone removes the two. A child made by fork shares the lock until
    it calls `close` or exits.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock. Raises FolderInUseError (held by a live process, or its file was just removed) or OSError."""
        self._path, self._created = path, not path.exists()
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
        if not _is_file_of(self._descriptor, path):
            os.close(self._descriptor)
            raise FolderInUseError("another process, which has just removed it")
        self._previous_text = os.pread(self._descriptor, _OWNER_BYTES, 0)
        self.previous_owner = _owner(self._descriptor)
        """The process that died while holding the lock, or None after an orderly release."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        self._replace(self._descriptor, text.encode())

    def release(self) -> None:
        """Releases the lock; harmless when it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self.close()

    def undo(self) -> None:
        """Releases the lock and leaves its file as it was found: not there, or with the name of a dead owner."""
        if self._descriptor is not None and self._created:
            self._path.unlink()
        elif self._descriptor is not None:
            self._replace(self._descriptor, self._previous_text)
        self.close()

    @staticmethod
    def _replace(descriptor: int, text: bytes) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)

    def close(self) -> None:
        """Closes this process's copy only: a child made by fork calls it, so as not to hold a dead parent's lock."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


class LockOwner(NamedTuple):
    """The process that holds a lock since a time in UTC, or that died while holding it."""

    pid: int
    host: str
    since: str


def read_owner(path: Path) -> LockOwner | None:
    """The owner that the file of a FolderLock names; None after an orderly release, or without a readable file."""
    try:
        with open_regular(path, follow_links=False) as file:
            return _read_owner(file.fileno())
    except OSError:
        return None


def _owner(descriptor: int) -> str | None:
    owner = _read_owner(descriptor)
    return None if owner is None else f"pid {owner.pid} on {owner.host!r} since {owner.since!r}"


def _read_owner(descriptor: int) -> LockOwner | None:
    try:
        record = json.loads(os.pread(descriptor, _OWNER_BYTES, 0))
        return LockOwner(int(record["pid"]), str(record["host"]), str(record["since"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
