"""Files of a run that grow by whole JSON lines: appended, cut on resume, read; a full disk does not end the run."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megalin.errors import StorageError

_log = logging.getLogger(__name__)


class Outlet:
    """A place that a run tells things to and whose failure must not end it: the first OSError is logged, once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def attempt(self, write: Callable[[], None]) -> None:
        """Runs `write`; where that fails, what it had to tell is missing there."""
        try:
            write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s cannot be written (%s); training goes on, steps are missing there until it can",
                    self._name,
                    error.strerror,
                )


class AppendedFile:
    """A file that grows by whole records: one that does not fit is taken back, and told of once."""

    def __init__(self, path: Path) -> None:
        """Opens or creates it; raises OSError."""
        self._outlet = Outlet(str(path))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: bytes) -> None:
        """Adds a record; with the operating system when this returns."""
        self._outlet.attempt(lambda: self._append(record))

    def _append(self, record: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if len(rest) < len(record):
                os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


class JsonLines:
    """A file of JSON objects, each with its step, one a line."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """Opens the file and cuts off what a crash left unreadable.

        Args:
            resumed_step: lines of later steps, which will be done again, are cut off too; None keeps them.

        Raises:
            StorageError: it cannot be opened or cut.
        """
        try:
            if path.exists():
                _cut(path, resumed_step)
            self._file = AppendedFile(path)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}); free space, or choose another run folder"
            ) from None

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Adds a line; a number that is not finite is null, beside its name with _nonfinite."""
        line: dict[str, float | int | str | None] = {"step": step}
        for name, value in values.items():
            if isinstance(value, str) or math.isfinite(value):
                line[name] = value
            else:
                line[name], line[f"{name}_nonfinite"] = None, repr(float(value))
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, also while it grows: a torn or foreign line is left out. Raises OSError."""
    with path.open("rb") as file:
        for _, record in _records(file):
            yield record


def _cut(path: Path, last_step: int | None) -> None:
    """Rewrites the file at `path` with its readable lines up to `last_step`."""
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as source, temporary.open("wb") as file:
        kept = (line for line, record in _records(source) if last_step is None or record["step"] <= last_step)
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _records(file: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line that is a JSON object with a step, and that object."""
    for line in file:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record
