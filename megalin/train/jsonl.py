"""JSON-lines files of a run: append, truncate on resume, read; a full disk does not stop training."""

from __future__ import annotations

import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalin.errors import StorageError
from megalin.files import open_append, open_regular, open_temporary, publish

_log = logging.getLogger(__name__)


class BestEffortWriter:
    """Wraps writes that must not stop training: the first OSError is logged, later ones are ignored."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def attempt(self, write: Callable[[], None]) -> bool:
        """Runs `write`; if it raises OSError, its output is lost and the result False."""
        try:
            write()
            return True
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s cannot be written (%s); training continues, but steps are missing there until it can",
                    self._name,
                    error.strerror,
                )
            return False


class AppendedFile:
    """An append-only file of whole records: a partly written record is removed, and the first failure is logged."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; raises OSError."""
        self._writer = BestEffortWriter(str(path))
        self._descriptor = open_append(path)

    def write(self, record: bytes) -> bool:
        """Appends a record; the operating system has it when this returns True."""
        return self._writer.attempt(lambda: self._append(record))

    def sync(self) -> None:
        """Flushes the file to the disk."""
        self._writer.attempt(lambda: os.fsync(self._descriptor))

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
    """A file of JSON objects, one per line, each with its step."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """Opens the file and removes lines that a crash left unreadable.

        Args:
            resumed_step: lines of later steps, which will be repeated, are removed too; None keeps them.

        Raises:
            StorageError: it cannot be opened or truncated.
        """
        self._path = path
        self._file = _open(path, resumed_step)

    def write(self, step: int, values: Mapping[str, float | int | str]) -> bool:
        """Appends a line; a number that is not finite becomes null, with `<name>_nonfinite` added.

        Returns:
            False if the file cannot be written, as on a full disk.
        """
        line: dict[str, float | int | str | None] = {"step": step}
        for name, value in values.items():
            if isinstance(value, str) or math.isfinite(value):
                line[name] = value
            else:
                line[name], line[f"{name}_nonfinite"] = None, repr(float(value))
        return self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def rewind(self, step: int) -> None:
        """Removes the lines of steps after `step`. Raises StorageError if the file cannot be written."""
        file = _open(self._path, step)
        self._file.close()
        self._file = file

    def sync(self) -> None:
        """Flushes the file to the disk."""
        self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file, which may be growing; skips torn and foreign lines. Raises OSError."""
    with io.BufferedReader(open_regular(path, follow_links=True)) as file:
        for _, record in step_lines(file):
            yield record


def _open(path: Path, last_step: int | None) -> AppendedFile:
    try:
        if os.path.lexists(path):
            _truncate(path, last_step)
        return AppendedFile(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}); free space, or choose another run folder"
        ) from None


def _truncate(path: Path, last_step: int | None) -> None:
    """Rewrites the file at `path` with its readable lines up to `last_step`."""
    with io.BufferedReader(open_regular(path, follow_links=False)) as source, open_temporary(path) as file:
        file.writelines(line for line, record in step_lines(source) if last_step is None or record["step"] <= last_step)
        publish(file, path)


def step_lines(lines: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each complete line that is a JSON object with a step, and that object; skips torn and foreign lines."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record
