"""Atomic saving: a new temporary directory, every file synced, the manifest last, then one rename.

A save runs five collectives of objects on the default group at any size: rank 0's message (whether to start), torch's
gather and scatter of plans and its gather and broadcast of results, which torch pickles. They carry an error of any
rank; after one, another message sends the free space. Before checkpoints are removed, those that stay are verified
(verification.py). background.py runs the same collectives before it writes, and sends the rest through the store.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as engine_save

from megalin.checkpoint.publishing import (
    Publication,
    begin,
    free_space,
    prepare,
    prune,
    publish,
    storage_failure,
)
from megalin.checkpoint.storage import FILE_BYTES, SafetensorsWriter
from megalin.checkpoint.verification import VerifiedCheckpoints
from megalin.errors import MegalinError
from megalin.files import FolderLock
from megalin.parallel.agreement import distributed, on_rank_zero, rank


def save(
    root: str | Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep_latest: int | None = None,
    keep_steps: Collection[int] = (),
    verified: VerifiedCheckpoints | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Publishes `root/step-<step>`; all ranks call it, with the same root on a shared file system.

    A published directory is never modified: if the step exists already and is valid, it is left unchanged. A failure
    leaves earlier checkpoints unchanged.

    Args:
        tensors: by global name. A DTensor is saved once, however often it is replicated; so is a plain tensor, which
            must be equal on all ranks that have the name.
        state: JSON values; rank 0's are saved.
        keep_latest: number of valid checkpoints up to this step to keep; older ones are removed after this one is
            published. A damaged one does not count, so it never replaces a valid one.
        keep_steps: steps whose checkpoints are neither removed nor counted.
        verified: remembers checkpoints between saves, so that each is hashed once.
        file_bytes: largest size of a file.

    Returns:
        The published directory.

    Raises:
        StorageError: on every rank if any rank cannot write; names the rank, the file and the free space.
    """
    publication = prepare(
        root,
        step=step,
        tensors=tensors,
        state=state,
        keep_latest=keep_latest,
        keep_steps=keep_steps,
        verified=verified,
    )
    save_now(publication, tensors, file_bytes=file_bytes)
    return publication.target


def save_now(publication: Publication, tensors: Mapping[str, Tensor], *, file_bytes: int = FILE_BYTES) -> None:
    """Writes and publishes the checkpoint as `save` does, before it returns."""
    locks: list[FolderLock] = []
    try:
        temporary = on_rank_zero(partial(begin, publication, locks), Path | None)
        if temporary is not None:
            publish_files = partial(publish, publication, temporary)
            run_writer(SafetensorsWriter(temporary, publish_files, file_bytes=file_bytes), tensors, publication)
            prune(publication)
    finally:
        for lock in locks:
            lock.release()


def run_writer(writer: SafetensorsWriter, tensors: Mapping[str, Tensor], publication: Publication) -> None:
    """Plans which rank stores which boxes of the tensors, and calls the writer; a collective, with the errors of
    `save`."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            # A single process without a process group is supported and needs no warning.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            engine_save(dict(tensors), storage_writer=writer, planner=planner, no_dist=not distributed())
    except CheckpointException as error:
        # Every rank has the same failures here; the free space is measured once, before the leftovers are removed.
        free = on_rank_zero(partial(free_space, publication.target.parent))
        if rank() == 0:
            shutil.rmtree(writer.directory, ignore_errors=True)
        raise _translate(error, publication, free) from None


def _translate(error: CheckpointException, publication: Publication, free: str) -> BaseException:
    """The exception to raise for torch's CheckpointException, a BaseException that wraps those of all ranks."""
    failures = {number: failure for number, (failure, _) in sorted(error.failures.items())}
    for failure in failures.values():
        if isinstance(failure, (KeyboardInterrupt, SystemExit)):
            return failure
    if known := {number: failure for number, failure in failures.items() if isinstance(failure, MegalinError)}:
        kind = type(next(iter(known.values())))
        return kind("; ".join(f"rank {number}: {failure}" for number, failure in known.items()))
    if not all(isinstance(failure, OSError) for failure in failures.values()):
        return RuntimeError(f"saving to {publication.target.parent} failed: {error}")
    causes = "; ".join(f"rank {number}: {failure}" for number, failure in failures.items())
    return storage_failure(publication, causes, free)
