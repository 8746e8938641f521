"""Events of a run other than its steps: starts, resumptions, warnings, and the error that ended it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from megalin.errors import REFUSALS
from megalin.parallel.agreement import on_rank_zero, rank
from megalin.train.jsonl import JsonLines

EventKind = Literal["started", "resumed", "taken over", "warning", "error"]
"""taken over: the previous process was killed. warning: logged by megalin. error: ended the process."""

_logger = logging.getLogger("megalin")


class EventLog:
    """Writer of `incidents.jsonl`, one JSON line per event: step, time (UTC), kind, message. A context manager.

    Unlike metrics, lines stay when a run resumes from an earlier step. Between enter and exit, warnings that megalin
    logs on rank 0 are recorded, and so is the error that ends the body, whatever its type; but not a refusal before
    `begin`, which is no event of the run that the folder may hold.

    Attributes:
        step: finished steps, written to each line; kept up to date by `Metrics`.
        last: the newest event of this process except starts, for people; empty before the first.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file on rank 0; every rank creates one (one broadcast). Raises StorageError on every rank."""
        self.step = 0
        self.last = ""
        self._begun = False
        self._file: JsonLines | None = None
        self._handler = _Handler(self)
        on_rank_zero(lambda: self._open(path))

    def _open(self, path: Path) -> None:
        self._file = JsonLines(path)

    def write(self, kind: EventKind, message: str) -> None:
        """Appends a line on rank 0; does nothing on other ranks."""
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        if kind not in ("started", "resumed"):
            self.last = f"{now[11:19]} {kind}: {message}"
        self._file.write(self.step, {"time": now, "kind": kind, "message": message})

    def begin(self, step: int, where: str) -> None:
        """Records that the run starts, or resumes after `step` finished steps; `where` names its devices."""
        self.step, self._begun = step, True
        self.write("resumed" if step else "started", where)

    def __enter__(self) -> Self:
        if rank() == 0:
            _logger.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _logger.removeHandler(self._handler)
        if error is not None and (self._begun or not isinstance(error, REFUSALS)):
            self.write("error", f"{type(error).__name__}: {error}")
        if self._file is not None:
            self._file.close()
            self._file = None


class _Handler(logging.Handler):
    def __init__(self, event_log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._event_log = event_log

    def emit(self, record: logging.LogRecord) -> None:
        self._event_log.write("warning", record.getMessage())
        # Python prints a warning that no handler takes; this handler only records it.
        if logging.lastResort is not None and not logging.root.handlers:
            logging.lastResort.handle(record)
