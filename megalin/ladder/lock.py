"""Lock of a rung: a file that one worker creates and keeps fresh, and that another takes once its owner is dead."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from megalin.files import NO_LOCKS, exclusive, storage_errors

STALE_SECONDS = 600.0
"""Age of the last heartbeat after which a worker of another host counts as dead."""
_BEATS = 10
"""Heartbeats in that time."""


class Owner(NamedTuple):
    """Content of a lock."""

    host: str
    pid: int
    heartbeat: float
    """Unix time in seconds."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class RungLock:
    """A held lock, whose heartbeat a thread renews until `release`; a context manager.

    On the owner's host the kernel says whether it lives: the file is flocked by the worker and by the processes that
    inherit its descriptor. For workers of other hosts, and on file systems without locks, the heartbeat decides.

    Attributes:
        lost: True once another worker has taken the lock, after this process was suspended for too long.
    """

    def __init__(self, path: Path, descriptor: int, stale_seconds: float) -> None:
        """Of a file that `take` has created."""
        self.path, self.lost = path, False
        self.descriptor: int | None = descriptor
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._renew, args=(stale_seconds / _BEATS,), daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, path: Path, *, stale_seconds: float = STALE_SECONDS) -> Self | Owner:
        """Takes the lock, also of a dead worker; else the owner. Raises StorageError."""
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(path.with_name(f"{path.name}.guard")):
                if (owner := live_owner(path, stale_seconds=stale_seconds)) is not None:
                    return owner
                path.unlink(missing_ok=True)
                # Inheritable: a run that outlives its worker still holds the lock.
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
                _flock(descriptor)
                return cls(path, descriptor, stale_seconds)

    def release(self) -> None:
        """Stops the heartbeat and removes the file, unless another worker has taken it."""
        self._ended.set()
        self._thread.join()
        if self.descriptor is not None:
            if self._is_ours():
                self.path.unlink(missing_ok=True)
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _renew(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            if not self._is_ours():
                self.lost = True
                return
            self._beat()

    def _beat(self) -> None:
        assert self.descriptor is not None
        owner = Owner(socket.gethostname(), os.getpid(), time.time())
        data = json.dumps(owner._asdict() | {"heartbeat": round(owner.heartbeat, 3)}).ljust(160).encode()
        os.pwrite(self.descriptor, data, 0)  # of one length, so that a reader finds old or new text

    def _is_ours(self) -> bool:
        assert self.descriptor is not None
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def live_owner(path: Path, *, stale_seconds: float = STALE_SECONDS) -> Owner | None:
    """The living worker that holds a lock; None without one. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        owner = _read(descriptor)
        if owner.host == socket.gethostname() and (locked := _flock(descriptor)) is not None:
            return None if locked else owner
        return owner if time.time() - owner.heartbeat < stale_seconds else None
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Owner:
    """The owner that a file names; one that is being created has its file's time."""
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(str(record["host"]), int(record["pid"]), float(record["heartbeat"]))
    except (ValueError, KeyError, TypeError):
        return Owner("an unknown host", 0, os.fstat(descriptor).st_mtime)


def _flock(descriptor: int) -> bool | None:
    """Whether this descriptor has got the kernel's lock; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True
