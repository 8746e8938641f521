"""Files of the launcher in the run folder: heartbeats and output of the ranks, and the error that ended them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from megalin.errors import StorageError
from megalin.parallel.heartbeats import HeartbeatFile, create
from megalin.train.config_file import CONFIG_NAME
from megalin.train.jsonl import JsonLines

HEARTBEATS_NAME = "heartbeats"
OUTPUT_NAME = "ranks.log"


class RunFiles:
    """The files of the ranks of one start. They lie in a temporary folder until the run has begun: a refused start
    leaves a run folder as it was.

    Attributes:
        begun: whether the ranks have begun the run, so that its folder may be written.
        heartbeats: the heartbeats of the ranks.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        """Creates the file of heartbeats. Raises StorageError."""
        self.folder = folder
        self.begun = False
        self._config = folder / CONFIG_NAME
        self._before = _version(self._config)
        # Within or near the run folder, so that the file can be renamed into it.
        parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        try:
            self._temporary = Path(tempfile.mkdtemp(prefix=".megalin-launch-", dir=parent))
        except OSError:
            self._temporary = Path(tempfile.mkdtemp(prefix="megalin-launch-"))
        self.path = self._temporary / HEARTBEATS_NAME
        create(self.path, world_size)
        self.heartbeats = HeartbeatFile.open(self.path)

    def check_begun(self) -> bool:
        """True once: when rank 0 has written the run's config, after which nothing refuses the run."""
        if self.begun or _version(self._config) == self._before:
            return False
        self.begun = True
        target = self.folder / HEARTBEATS_NAME
        with contextlib.suppress(OSError):  # another file system: `close` copies the file
            os.rename(self.path, target)
            self.path = target
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
        """Removes the temporary folder; with `keep`, the heartbeats of a run that had begun stay in its folder."""
        with contextlib.suppress(OSError):
            if keep and self.begun and self.path.parent == self._temporary:
                shutil.copyfile(self.path, self.folder / HEARTBEATS_NAME)
            elif self.begun and not keep:
                self.path.unlink()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _version(path: Path) -> tuple[int, int] | None:
    """Identity of a file's contents, which every atomic replacement changes."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns
