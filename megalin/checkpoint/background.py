"""Saving in the background: training waits for a copy of the state, and a thread writes and publishes it.

The copy runs the collectives of a foreground save (save.py), which plan the files. The threads of the ranks write,
hash, verify and publish them as a foreground save does, but send their messages through the store: they launch no
collective, which would have to come in one order with those of training (docs/adr/0020-background-saves.md).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.checkpoint.manifest import FileRecord
from megalin.checkpoint.publishing import Publication, begin, free_space, prepare, prune, publish, storage_failure
from megalin.checkpoint.save import run_writer
from megalin.checkpoint.snapshot import HostBuffer, SnapshotWriter
from megalin.checkpoint.storage import FILE_BYTES, write_index
from megalin.errors import MegalinError, RankStalledError, StorageError
from megalin.files import FolderLock
from megalin.parallel.agreement import on_every_rank, on_rank_zero, rank, sum_over_ranks, world_size
from megalin.parallel.heartbeats import current
from megalin.parallel.rank_failures import is_rank_failure
from megalin.parallel.store_channel import StoreChannel
from megalin.slow_work import slow_work

_POLL_SECONDS = 0.05
_FAILED_RANK_SECONDS = 1.0
"""Time for the save in flight to end where a rank has failed: less than the watchdog leaves to the process."""

_log = logging.getLogger(__name__)


class FinishedSave(NamedTuple):
    """A checkpoint that was published."""

    step: int
    write_seconds: float
    """Time from the end of its copy to its publication and the removal of old ones."""


class BackgroundSaver:
    """Saves one checkpoint at a time in the background; every rank has one and makes the same calls in the same order.

    It holds a copy of the boxes that this rank stores, in memory that is reused between saves.

    Args:
        stall_seconds: longest time that a thread may make no progress, in one part of 16 MiB or one call of the file
            system. Then all ranks raise RankStalledError.
    """

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._buffer = HostBuffer()
        self._channel: StoreChannel | None = None
        self._writing: _Writing | None = None

    def reserve(self, root: Path, tensors: Mapping[str, Tensor], *, file_bytes: int = FILE_BYTES) -> None:
        """Allocates the memory for saves of these tensors to `root` by a first copy; a collective. Raises
        HostMemoryError as `start` does."""
        publication = prepare(root, step=0, tensors=tensors, state={})
        snapshot = SnapshotWriter(root / ".tmp-none", self._buffer, file_bytes=file_bytes)
        run_writer(snapshot, tensors, publication)
        if snapshot.copied is not None:
            snapshot.copied.synchronize()

    def start(
        self, publication: Publication, tensors: Mapping[str, Tensor], *, file_bytes: int = FILE_BYTES
    ) -> torch.cuda.Event | None:
        """Copies the tensors, and starts to write them; a collective. The save before must be finished.

        A step that is published and valid already is left unchanged.

        Returns:
            An event that is recorded on the GPU after the copy: no tensor may be changed before. None: the copy is
            complete.

        Raises:
            StorageError: on every rank, if rank 0 cannot make the temporary directory.
            HostMemoryError: on every rank, if a host has too little memory left for the copy.
        """
        assert self._writing is None, "a save is in flight"
        locks: list[FolderLock] = []
        try:
            temporary = on_rank_zero(partial(begin, publication, locks), Path | None)
            if temporary is not None:
                snapshot = SnapshotWriter(temporary, self._buffer, file_bytes=file_bytes)
                run_writer(snapshot, tensors, publication)
                self._channel = self._channel or StoreChannel("background_saves")
                self._writing = _Writing(publication, snapshot, locks, self._channel)
        finally:
            if self._writing is None:
                for lock in locks:
                    lock.release()
        return None if self._writing is None else self._writing.start()

    def has_ended(self) -> bool:
        """Whether this rank's thread has ended with a save that is not finished yet, with or without an error. One that
        makes no progress is given up."""
        return self._writing is not None and self._writing.has_ended(self._stall_seconds)

    def finish(self) -> FinishedSave | None:
        """Waits for the save in flight; a collective. None without one.

        Raises:
            StorageError, RankStalledError, MegalinError: on every rank, if the save failed on any.
        """
        writing = self._writing
        if writing is None:
            return None
        writing.wait(self._stall_seconds)
        self._writing = None
        on_every_rank(writing.raise_error)
        return FinishedSave(writing.step, writing.seconds)

    @contextmanager
    def completing(self) -> Iterator[None]:
        """On an error of the body, waits for the save in flight before the error is raised: its state is that of a good
        step. Where a rank has failed, it waits for a second only."""
        try:
            yield
        except BaseException as error:
            if self._writing is not None:
                self._complete(self._writing, rank_failed=is_rank_failure(error))
            raise
        finally:
            if self._channel is not None:
                self._channel.close()
            if self._writing is None or not self._writing.is_alive:
                self._buffer.close()

    def _complete(self, writing: _Writing, *, rank_failed: bool) -> None:
        current().enter("save")
        with slow_work(f"writing the checkpoint of step {writing.step}", shown=rank() == 0):
            writing.wait_alone(self._stall_seconds, _FAILED_RANK_SECONDS if rank_failed else self._stall_seconds)
        if rank() == 0 and (writing.is_alive or writing.error is not None):
            reason = writing.error or "other ranks did not finish"
            _log.warning(
                "the checkpoint of step %d, in flight at the error, is not published: %s", writing.step, reason
            )


class _Writing:
    """A save in flight: this rank's thread, and the result of all of them."""

    def __init__(
        self, publication: Publication, snapshot: SnapshotWriter, locks: list[FolderLock], channel: StoreChannel
    ) -> None:
        self._publication, self._snapshot, self._locks, self._channel = publication, snapshot, locks, channel
        self.step, self.seconds = publication.step, 0.0
        self.error: MegalinError | None = None
        self._is_given_up = False
        # Not waited for at the exit of the process: a stuck file system would hold it.
        self._thread = threading.Thread(target=self._run, name="megalin-save", daemon=True)

    def start(self) -> torch.cuda.Event | None:
        self._channel.beat()
        self._thread.start()
        return self._snapshot.copied

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def has_ended(self, stall_seconds: float) -> bool:
        if self._is_given_up or not self._thread.is_alive():
            return True
        idle_seconds = self._channel.idle_seconds
        if idle_seconds <= stall_seconds:
            return False
        self._is_given_up = True
        self.error = RankStalledError(
            f"rank {rank()} stalled: writing the checkpoint of step {self.step} to {self._publication.target.parent} "
            f"has made no progress for {idle_seconds:.0f} s (limit: train.phase_timeout_seconds = {stall_seconds:g}); "
            "look at this file system, then run the same command to continue from the newest checkpoint"
        )
        with contextlib.suppress(RuntimeError):  # without a store the other ranks fail by themselves
            self._channel.abort(self.error)
        return True

    def wait(self, stall_seconds: float) -> None:
        """Waits until the threads of all ranks have ended; a collective, which fails where a rank dies."""
        while int(sum_over_ranks(torch.tensor(int(self.has_ended(stall_seconds))))) < world_size():
            self._thread.join(_POLL_SECONDS)
            if not self._thread.is_alive():
                time.sleep(_POLL_SECONDS)

    def wait_alone(self, stall_seconds: float, others_seconds: float) -> None:
        """Waits until this rank's thread has ended, at most `others_seconds` for other ranks."""
        waited_since = time.monotonic()
        while not self.has_ended(stall_seconds) and time.monotonic() - waited_since < others_seconds:
            self._thread.join(_POLL_SECONDS)
            current().beat()
            if not self._channel.waits:
                waited_since = time.monotonic()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._write()
        except MegalinError as error:
            self.error = self.error or error
        except BaseException as error:  # the process of the store has exited, or a bug
            self.error = MegalinError(f"rank {rank()}: writing the checkpoint of step {self.step} failed: {error}")
            with contextlib.suppress(RuntimeError):
                self._channel.abort(self.error)
            raise
        finally:
            for lock in self._locks:
                lock.release()
            self.seconds = time.perf_counter() - started

    def _write(self) -> None:
        channel = self._channel
        try:
            records = on_every_rank(partial(self._snapshot.write, channel.beat), dict[str, FileRecord], channel=channel)
            on_rank_zero(partial(self._publish, records), channel=channel)
        except StorageError as error:
            free = on_rank_zero(self._clean_up, channel=channel)
            raise storage_failure(self._publication, str(error), free) from None
        prune(self._publication, channel)

    def _publish(self, records: list[dict[str, FileRecord]]) -> None:
        assert self._snapshot.index is not None
        directory = self._snapshot.directory
        files = {name: record for of_rank in records for name, record in of_rank.items()}
        publish(self._publication, directory, files | write_index(directory, self._snapshot.index))

    def _clean_up(self) -> str:
        """Rank 0: removes the temporary directory; returns the space that was free before, as text."""
        free = free_space(self._publication.target.parent)
        shutil.rmtree(self._snapshot.directory, ignore_errors=True)
        return free
