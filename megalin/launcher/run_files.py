"""Files of the launcher in the run folder: heartbeats and output of the ranks, and the error that ended them."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path

from megalin.errors import StorageError
from megalin.parallel.heartbeat_copies import write_copy, write_pointer
from megalin.parallel.heartbeats import HeartbeatFile
from megalin.train.config_file import CONFIG_NAME
from megalin.train.jsonl import JsonLines

HEARTBEATS_NAME = "heartbeats"
OUTPUT_NAME = "ranks.log"


class RunFiles:
    """The files of the ranks of one start. The heartbeats lie in memory, and nothing is written before the run has
    begun: a refused start leaves a run folder as it was.

    Attributes:
        begun: whether the ranks have begun the run, so that its folder may be written.
        heartbeats: the heartbeats of the ranks.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        """Creates the heartbeats. Raises StorageError."""
        self.folder = folder
        self.begun = False
        self._config = folder / CONFIG_NAME
        self._before = _version(self._config)
        self.heartbeats = HeartbeatFile.create(world_size)

    def check_begun(self) -> bool:
        """True once: when rank 0 has written the run's config, after which nothing refuses the run."""
        if self.begun or _version(self._config) == self._before:
            return False
        self.begun = True
        write_pointer(self.heartbeats, self.folder / HEARTBEATS_NAME)
        return True

    def record_error(self, step: int, message: str) -> None:
        """Adds the error that ended the ranks to the run's events, if the run has begun."""
        if self.begun:
            with contextlib.suppress(StorageError):  # printed too
                events = JsonLines(self.folder / "incidents.jsonl")
                now = datetime.now(UTC).isoformat(timespec="seconds")
                events.write(step, {"time": now, "kind": "error", "message": message})
                events.close()

    def close(self, *, keep: bool) -> None:
        """Ends the heartbeats; with `keep`, a copy of those of a run that had begun stays in its folder."""
        if self.begun and keep:
            write_copy(self.heartbeats, self.folder / HEARTBEATS_NAME)
        elif self.begun:
            with contextlib.suppress(OSError):
                (self.folder / HEARTBEATS_NAME).unlink()
        self.heartbeats.close()


def _version(path: Path) -> tuple[int, int] | None:
    """Identity of a file's contents, which every atomic replacement changes."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns
