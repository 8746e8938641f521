"""Events of a run other than its steps: starts, resumptions, warnings, and the error that ended it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from megalin.errors import REFUSALS, PreemptedError, StorageError
from megalin.files import open_append
from megalin.parallel.agreement import on_rank_zero, rank
from megalin.train.jsonl import JsonLines

EventKind = Literal["started", "resumed", "changed", "taken over", "warning", "stopped", "error"]
"""changed: other values than the steps before had. taken over: the previous process was killed. warning: logged by
megalin. stopped: by a signal, with all steps saved. error: ended the process."""

_logger = logging.getLogger("megalin")


class EventLog:
    """Writer of `incidents.jsonl`, one JSON line per event: step, time (UTC), kind, message. A context manager.

    Unlike metrics, lines stay when a run resumes from an earlier step. Between enter and exit, warnings that megalin
    logs on rank 0 are recorded, and so is the error that ends the body, whatever its type. A refusal before `begin` is
    no event of the run that the folder may hold: until then the file is not opened, and lines wait.

    Attributes:
        step: finished steps, written to each line; kept up to date by `Metrics`.
        last: the newest event of this process except starts, for people; empty before the first.
    """

    def __init__(self, path: Path) -> None:
        self.step = 0
        self.last = ""
        self._path = path
        self._begun = False
        self._waiting: list[tuple[int, dict[str, float | int | str]]] = []
        self._file: JsonLines | None = None
        self._handler = _Handler(self)

    def _open(self) -> None:
        self._file = JsonLines(self._path)
        for step, line in self._waiting:
            self._file.write(step, line)
        self._waiting = []

    def write(self, kind: EventKind, message: str) -> None:
        """Appends a line on rank 0; does nothing on other ranks."""
        if rank() != 0:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        if kind not in ("started", "resumed", "changed"):
            self.last = f"{now[11:19]} {kind}: {message}"
        line: dict[str, float | int | str] = {"time": now, "kind": kind, "message": message}
        if self._file is None:
            self._waiting.append((self.step, line))
        else:
            self._file.write(self.step, line)

    def write_last(self, message: str) -> None:
        """Appends the error with which this process ends without a return to `__exit__`; on a rank other than 0, whose
        process may have died, to the file itself."""
        if rank() == 0:
            self.write("error", message)
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"step": self.step, "time": now, "kind": "error", "message": message}
        with contextlib.suppress(OSError):
            descriptor = open_append(self._path)
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            os.close(descriptor)

    def begin(self, step: int, where: str, changes: Sequence[str] = ()) -> None:
        """Records that the run starts, or resumes after `step` finished steps with these `changes`; `where` names its
        devices.

        Every rank calls it (one broadcast). Raises StorageError on every rank when the file cannot be opened.
        """
        on_rank_zero(self._open)
        self.step, self._begun = step, True
        self.write("resumed" if step else "started", where)
        for change in changes:
            self.write("changed", change)

    def __enter__(self) -> Self:
        if rank() == 0:
            _logger.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _logger.removeHandler(self._handler)
        if self._begun or not isinstance(error, REFUSALS):
            if isinstance(error, PreemptedError):
                self.write("stopped", str(error))
            elif error is not None:
                self.write("error", f"{type(error).__name__}: {error}")
            self._open_for_waiting_lines()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_for_waiting_lines(self) -> None:
        """Writes the lines of a run that ended before `begin`; a file that cannot be opened must not hide the error."""
        if self._waiting:
            try:
                self._open()
            except StorageError as error:
                _logger.error("%s", error)


class _Handler(logging.Handler):
    def __init__(self, event_log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._event_log = event_log

    def emit(self, record: logging.LogRecord) -> None:
        self._event_log.write("warning", record.getMessage())
        # Python prints a warning that no handler takes; this handler only records it.
        if logging.lastResort is not None and not logging.root.handlers:
            logging.lastResort.handle(record)
