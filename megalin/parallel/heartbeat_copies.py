"""Heartbeats in a run folder: the place of those in memory while the run goes on, and a copy after it has failed.

Both are for other programs and best effort: the run and its watchdogs work without them, on a full disk too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from megalin.errors import StorageError
from megalin.files import FileTooLargeError, read_limited
from megalin.parallel.heartbeats import HeartbeatFile

_POINTER = re.compile(rb"(/proc/\d+/fd/\d+) ([\w-]+)\n")
_POINTER_BYTES = 256


def write_pointer(file: HeartbeatFile, path: Path) -> None:
    """Writes to `path` where the file, which this process has created, lies in memory."""
    _replace(path, [(0, f"{file.path} {file.name}\n".encode())])


def write_copy(file: HeartbeatFile, path: Path) -> None:
    """Copies the heartbeats to `path`."""
    _replace(path, [*file.written(), (len(file.mapped), b"")])


def read_heartbeats(path: Path) -> HeartbeatFile:
    """Reads the heartbeats of a run from the file in its folder, `path`, or from the memory whose place it contains.

    Raises:
        StorageError: there are none, or the processes that had them in memory have ended or run on another host.
    """
    try:
        with contextlib.suppress(FileTooLargeError):  # a copy is larger
            pointer = _POINTER.fullmatch(read_limited(path, limit_bytes=_POINTER_BYTES, follow_links=False))
            if pointer is not None:
                place, name = os.fsdecode(pointer[1]), os.fsdecode(pointer[2])
                if not os.readlink(place).startswith(f"/memfd:{name}"):
                    raise StorageError(f"{path}: the process with these heartbeats has ended; start the run again")
                return HeartbeatFile.open(place, writable=False)
    except OSError as error:
        raise StorageError(f"cannot read the heartbeats {path}: {error}; start the run again") from None
    return HeartbeatFile.open(path, writable=False)


def _replace(path: Path, parts: Iterable[tuple[int, bytes]]) -> None:
    """Writes a new file of these parts, each with its place; where that fails there is none."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for place, data in parts:
                rest = memoryview(data)
                os.ftruncate(descriptor, place)
                while rest:
                    rest = rest[os.pwrite(descriptor, rest, place + len(data) - len(rest)) :]
        except OSError:
            path.unlink()
        finally:
            os.close(descriptor)
