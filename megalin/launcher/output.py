"""Output of the ranks: lines for people, each once, and all of it in a file of the run folder."""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

from megalin.train.jsonl import AppendedFile, BestEffortWriter

_DELAY_SECONDS = 0.4
"""Time that a line of a rank waits for the same line of rank 0, which is shown in its place."""
_SAME_SECONDS = 20.0
"""Time during which the same line of another rank is not shown."""
_EARLY_BYTES = 1 << 20
"""Output kept before the run has begun, and its folder may be written."""
_FILE_BYTES = 8 << 20
"""Size at which the file is renamed to NAME.1, and a new one begins."""


class RawOutput:
    """The file of all output of the ranks, each line with its rank; the newest 8 to 16 MiB are kept."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._early: deque[bytes] = deque()
        self._early_bytes = self._size = 0
        self._file: AppendedFile | None = None
        self._writer = BestEffortWriter("the output of the ranks")

    @property
    def path(self) -> Path | None:
        """The file; None without one."""
        return None if self._file is None else self._path

    def write(self, line: bytes) -> None:
        """Adds a line."""
        if self._path is None:
            self._early.append(line)
            self._early_bytes += len(line)
            while self._early_bytes > _EARLY_BYTES:
                self._early_bytes -= len(self._early.popleft())
            return
        if self._file is None or self._size > _FILE_BYTES:
            self._writer.attempt(self._next_file)
        if self._file is not None and self._file.write(line):
            self._size += len(line)

    def open(self, path: Path) -> None:
        """Names the file, and adds the lines until now to it."""
        self._path = path
        early, self._early = self._early, deque()
        for line in early:
            self.write(line)

    def _next_file(self) -> None:
        assert self._path is not None
        if self._file is not None:
            self.close()
            os.replace(self._path, f"{self._path}.1")
        self._file = AppendedFile(self._path)
        self._size = self._path.stat().st_size

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


_VERDICTS = (b"RankFailedError: ", b"RankStalledError: ")
"""Starts of lines that a rank's watchdog writes to descriptor 2, as its main thread may hold all else."""


class _Waiting(NamedTuple):
    due: float
    rank: int
    text: str
    prefix: str | None
    """Text before the line; None if the rank itself has shown it."""


class RankOutput:
    """Lines of the ranks: `raw` keeps all of them, and those for people are shown on standard error.

    Rank 0 shows its own lines, on a live view if there is one. A line of another rank is shown with its number, unless
    a rank has shown the same line just before. Verdicts of watchdogs are shown too.
    """

    def __init__(self) -> None:
        self.raw = RawOutput()
        self._rests: dict[tuple[int, bool], bytes] = {}
        self._waiting: deque[_Waiting] = deque()
        self._recent: deque[_Waiting] = deque()
        self._recent_ranks: dict[str, Counter[int]] = {}  # by text: each rank's number of such lines in `_recent`
        self._shows_missing = True

    def add(self, rank: int, data: bytes, now: float, *, shown: bool) -> None:
        """Adds output of a rank.

        Args:
            now: time of the call, seconds.
            shown: it is for people.
        """
        *lines, rest = (self._rests.get((rank, shown), b"") + data).split(b"\n")
        if len(rest) > _EARLY_BYTES:
            lines, rest = [*lines, rest], b""
        self._rests[rank, shown] = rest
        for line in lines:
            self.raw.write(b"rank %d: %b\n" % (rank, line))
            text = line.decode(errors="backslashreplace").rstrip()
            if shown:
                delay, prefix = (_DELAY_SECONDS, f"rank {rank}: ") if rank else (0.0, None)
                self._waiting.append(_Waiting(now + delay, rank, text, prefix))
            elif line.startswith(_VERDICTS):
                self._waiting.append(_Waiting(now, rank, text, ""))

    def show(self, now: float, *, rest: bool = False) -> None:
        """Shows the lines that are due; with `rest`, all that wait."""
        while self._recent and self._recent[0].due < now - _SAME_SECONDS:
            self._drop_oldest()
        due = [line for line in self._waiting if rest or line.due <= now]
        self._waiting = deque(line for line in self._waiting if not rest and line.due > now)
        for line in sorted(due, key=lambda line: line.rank > 0):
            ranks = self._recent_ranks.setdefault(line.text, Counter())
            same = any(rank != line.rank for rank in ranks)
            missing = line.text.startswith("RankFailedError: ") and not self._shows_missing
            if line.prefix is not None and line.text and not same and not missing:
                print(f"{line.prefix}{line.text}", file=sys.stderr)
            self._recent.append(line)
            ranks[line.rank] += 1
        sys.stderr.flush()

    def _drop_oldest(self) -> None:
        line = self._recent.popleft()
        ranks = self._recent_ranks[line.text]
        ranks[line.rank] -= 1
        if not ranks[line.rank]:
            del ranks[line.rank]
        if not ranks:
            del self._recent_ranks[line.text]

    def hide_missing_ranks(self) -> None:
        """Shows no more errors of ranks that miss another one: it has ended, and the reason is known."""
        self._shows_missing = False

    def finish(self, rank: int, now: float) -> None:
        """Adds the last line of a rank that has ended, if it lacks its end."""
        for shown in (True, False):
            if self._rests.get((rank, shown)):
                self.add(rank, b"\n", now, shown=shown)
