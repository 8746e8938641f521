"""The run folder: all files that a run writes, owned by one run at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megalin.data.config import DEFAULT_CACHE
from megalin.errors import REFUSALS, ConfigError, StorageError
from megalin.files import FolderInUseError, FolderLock, remove, write_atomically
from megalin.parallel.agreement import on_rank_zero, rank
from megalin.train.config_file import CHECKPOINTS_NAME, CONFIG_NAME
from megalin.train.identity_file import IDENTITY_NAME
from megalin.train.ledger import LEDGER_NAME

_WRITTEN = frozenset(
    {
        *(CONFIG_NAME, CHECKPOINTS_NAME, LEDGER_NAME, "metrics.jsonl", "incidents.jsonl", "tensorboard", "loss.png"),
        *(
            "environment.json",
            IDENTITY_NAME,
            "kernels.json",
            "deepspeed.json",
            "initial_weights.json",
            "shard_digests.json",
        ),
        *("rollbacks.json", "metrics.prom", "ranks.log", "ranks.log.1", "heartbeats", "stacks", DEFAULT_CACHE),
    }
)
"""Names of the files and folders of a run."""

_log = logging.getLogger(__name__)


class RunFolder:
    """A run folder, created or reused, and locked until `close`; a context manager. When the run is refused
    (`REFUSALS`) before `keep`, a folder that it created is removed, and another one is left as it was.

    Every rank creates one (one broadcast); rank 0 holds the lock, which the end of its process releases.

    Attributes:
        previous_owner: on rank 0, a description of the process that died holding the lock; None after a clean exit.
    """

    def __init__(self, path: str | Path) -> None:
        """Creates and locks the folder.

        Raises:
            ConfigError: on every rank, when a live process owns it; names its pid, its host and the time of the lock.
            StorageError: on every rank, when it cannot be created or written.
        """
        self.path = Path(path)
        self._lock: FolderLock | None = None
        self._created: list[Path] = []
        self._kept = False
        self._entries: dict[Path, set[Path]] = {}
        self.previous_owner: str | None = None
        on_rank_zero(self._claim)

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / CHECKPOINTS_NAME

    @property
    def metrics(self) -> Path:
        """Metrics, one JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        """Digests of the steps' token ids, one JSON line per step."""
        return self.path / LEDGER_NAME

    @property
    def shard_digests(self) -> Path:
        """Digests of the shards that have none in a manifest, as the run first read them."""
        return self.path / "shard_digests.json"

    @property
    def rollbacks(self) -> Path:
        """The run's rollbacks, and the batches that it leaves out for them."""
        return self.path / "rollbacks.json"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def config(self) -> Path:
        """The resolved config, as TOML."""
        return self.path / CONFIG_NAME

    @property
    def deepspeed(self) -> Path:
        """JSON settings as passed to DeepSpeed, if it is the run's engine."""
        return self.path / "deepspeed.json"

    @property
    def initial_weights(self) -> Path:
        """Report on the tensors taken from another run's checkpoint, if the run started from one."""
        return self.path / "initial_weights.json"

    @property
    def kernels(self) -> Path:
        """Implementation of each op, and the reason for it."""
        return self.path / "kernels.json"

    @property
    def environment(self) -> Path:
        """Versions, device, host and mesh of the run."""
        return self.path / "environment.json"

    @property
    def identity(self) -> Path:
        """The values that decide the run's numbers, and the starts at which they changed."""
        return self.path / IDENTITY_NAME

    @property
    def incidents(self) -> Path:
        """Event log, one JSON line per start, warning or error."""
        return self.path / "incidents.jsonl"

    @property
    def stacks(self) -> Path:
        """Folder of the stacks of ranks in a run that stalled."""
        return self.path / "stacks"

    @property
    def loss_curve(self) -> Path:
        """Plot of the losses."""
        return self.path / "loss.png"

    def write_text(self, path: Path, text: str) -> None:
        """Replaces a small file of the folder atomically on rank 0 only. Raises StorageError."""
        assert path.parent == self.path, path
        if rank() == 0:
            try:
                write_atomically(path, text.encode())
            except OSError as error:
                raise StorageError(f"cannot write {path}: {error}; free space or fix the permissions") from None

    def write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        """`write_text` of a JSON object. Raises StorageError."""
        self.write_text(path, json.dumps(dict(value), indent=1, allow_nan=False) + "\n")

    def clean_if_refused(self, folder: Path) -> None:
        """Lets a refusal before `keep` remove what is added to `folder`, if that is inside of this one; on rank 0."""
        if self._lock is not None and self.path in folder.parents:
            self._entries[folder] = set(folder.iterdir()) if folder.exists() else set()

    def keep(self) -> None:
        """Marks the folder as the run's: from now on nothing is undone."""
        self._kept = True

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None and not self._kept and isinstance(error, REFUSALS):
            self._undo(self._lock)  # under the lock, so that no other run is in there
        self.close()

    def _undo(self, lock: FolderLock) -> None:
        """Removes what this object created, and releases the lock."""
        if self.path in self._created:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            for folder, entries in self._entries.items():
                for entry in set(folder.iterdir()) - entries if folder.exists() else ():
                    remove(entry)
                if not entries:
                    self._created.insert(0, folder)
            lock.undo()
        for folder in self._created:
            with contextlib.suppress(OSError):  # gone, or another run's folder is in there by now
                folder.rmdir()

    def _claim(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            try:
                self.path.mkdir(parents=True)
            except FileExistsError:
                missing = []
            lock = FolderLock(self.path / ".lock")
        except FolderInUseError as error:
            raise ConfigError(
                f"run folder {self.path} is in use by {error}; choose another folder for this run, or end that process"
            ) from None
        except OSError as error:
            raise StorageError(
                f"cannot write run folder {self.path}: {error}; choose a folder that you may create and write"
            ) from None
        self._lock, self.previous_owner = lock, lock.previous_owner
        self._created = missing
        # A data worker that outlives this process must not keep the lock.
        os.register_at_fork(after_in_child=lock.close)
        if lock.previous_owner is not None:
            _log.warning(
                "run folder %s: taken over from %s, which ended without closing it", self.path, lock.previous_owner
            )
        try:
            _check_entries(self.path)
            self._make(self.checkpoints)
            with contextlib.suppress(OSError):  # without events the run goes on; metrics.py warns
                self._make(self.tensorboard)
            for folder in (self.path, self.checkpoints):
                with tempfile.TemporaryFile(dir=folder):  # a read-only mount does not show in the permissions
                    pass
        except StorageError:
            self._undo(lock)
            self.close()
            raise
        except OSError as error:
            self._undo(lock)
            self.close()
            raise StorageError(
                f"cannot write run folder {self.path}: {error}; choose a folder that you may create and write"
            ) from None

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir()
            self._created.insert(0, folder)


def _check_entries(folder: Path) -> None:
    """Checks that what a run writes there is a file or folder of its own: no link out of it, no pipe that blocks.

    Raises:
        StorageError: names the entry.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.removesuffix(".tmp") not in _WRITTEN:
                continue
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                kind = "a symbolic link" if entry.is_symlink() else "a named pipe, socket or device"
                raise StorageError(
                    f"{entry.path} is {kind}; a run writes only files and folders of its own: remove it, or choose "
                    "another run folder"
                )
