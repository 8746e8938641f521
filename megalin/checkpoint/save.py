"""Atomic saving: a new temporary directory, every file synced, the manifest last, then one rename.

A save runs five collectives of objects on the default group at any size: rank 0's message (whether to start), torch's
gather and scatter of plans and its gather and broadcast of results, which torch pickles. They carry an error of any
rank; after one, another message sends the free space. Before checkpoints are removed, those that stay are verified
(verification.py).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as engine_save

from megalin.checkpoint.index import DTYPE_NAMES
from megalin.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointManifest,
    FileRecord,
    directory_step,
    file_problems,
    read_manifest,
    step_directory,
)
from megalin.checkpoint.storage import FILE_BYTES, SafetensorsWriter
from megalin.checkpoint.verification import VerifiedCheckpoints
from megalin.errors import CheckpointError, StorageError
from megalin.files import FolderInUseError, FolderLock, remove, sync_directory, write_new
from megalin.parallel.agreement import distributed, on_rank_zero, rank

_TEMPORARY_PREFIX = ".tmp-"
_log = logging.getLogger(__name__)


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
    assert keep_latest is None or keep_latest >= 1, keep_latest
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} is a {getattr(tensor, 'dtype', type(tensor))}: only tensors of a supported dtype can be saved"
            )
    document = json.dumps(dict(state), allow_nan=False, indent=1).encode()
    target = Path(root) / step_directory(step)
    locks: list[FolderLock] = []
    try:
        temporary = on_rank_zero(partial(_begin, target, locks), Path | None)
        if temporary is not None:
            publish = partial(_publish, temporary, target, step, document)
            _write(tensors, SafetensorsWriter(temporary, publish, file_bytes=file_bytes), temporary)
            if keep_latest is not None:
                _prune(target, step, keep_latest, keep_steps, verified or VerifiedCheckpoints())
    finally:
        for lock in locks:
            lock.release()
    return target


def _begin(target: Path, locks: list[FolderLock]) -> Path | None:
    """Rank 0: locks the root, removes leftovers of failed saves, makes the temporary directory; None if published."""
    root = target.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        locks.append(FolderLock(root / ".lock"))
        for entry in sorted(root.iterdir()):
            if entry.name.startswith(_TEMPORARY_PREFIX):
                _log.warning("%s: removed, the leftover of an unfinished save", entry)
                remove(entry)
        if os.path.lexists(target):
            problem = _verify(target)
            if problem is None:
                _log.warning("%s exists already and is valid; it is left unchanged", target)
                return None
            _log.warning("%s will be replaced: %s", target, problem)
        temporary = root / f"{_TEMPORARY_PREFIX}{target.name}-{secrets.token_hex(4)}"
        temporary.mkdir()
    except FolderInUseError as error:
        raise StorageError(f"{root}: {error} is saving there; only one run at a time may write checkpoints") from None
    except OSError as error:
        raise StorageError(
            f"cannot save to {root}: {error}; the checkpoint folder must be writable and on a file system that every "
            "rank shares"
        ) from None
    return temporary


def _verify(directory: Path) -> str | None:
    try:
        return "; ".join(file_problems(directory, read_manifest(directory))) or None
    except CheckpointError as error:
        return str(error)


def _write(tensors: Mapping[str, Tensor], writer: SafetensorsWriter, temporary: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            # A single process without a process group is supported and needs no warning.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            engine_save(dict(tensors), storage_writer=writer, planner=planner, no_dist=not distributed())
    except CheckpointException as error:
        # Every rank has the same failures here; the free space is measured once, before the leftovers are removed.
        free = on_rank_zero(partial(_free_space, temporary.parent))
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        raise _translate(error, temporary.parent, num_bytes, free) from None


def _free_space(root: Path) -> str:
    try:
        return f"{shutil.disk_usage(root).free:,} bytes are free there"
    except OSError as error:
        return f"its free space is unknown ({error})"


def _translate(error: CheckpointException, root: Path, num_bytes: int, free: str) -> BaseException:
    """The exception to raise for torch's CheckpointException, a BaseException that wraps those of all ranks."""
    failures = {number: failure for number, (failure, _) in sorted(error.failures.items())}
    for failure in failures.values():
        if isinstance(failure, (KeyboardInterrupt, SystemExit)):
            return failure
    if not all(isinstance(failure, OSError) for failure in failures.values()):
        return RuntimeError(f"saving to {root} failed: {error}")
    causes = "; ".join(f"rank {number}: {failure}" for number, failure in failures.items())
    return StorageError(
        f"cannot save to {root}: {causes}; the checkpoint needs about {num_bytes:,} bytes and {free}; earlier "
        "checkpoints are untouched; free space, or keep fewer checkpoints"
    )


def _publish(temporary: Path, target: Path, step: int, document: bytes, files: dict[str, FileRecord]) -> None:
    """Rank 0, after all ranks have written: writes state and manifest, and renames. Raises OSError."""
    write_new(temporary / STATE_FILE, document)
    files = {**files, STATE_FILE: FileRecord.of(document)}
    for name, record in files.items():
        size = (temporary / name).stat().st_size
        if size != record.size:
            raise OSError(f"{temporary / name}: {size} bytes, but {record.size} were written")
    manifest = CheckpointManifest(step=step, files=dict(sorted(files.items())))
    write_new(temporary / MANIFEST_FILE, manifest.model_dump_json(indent=1).encode())
    sync_directory(temporary)
    if os.path.lexists(target):
        broken = target.with_name(f"{_TEMPORARY_PREFIX}broken-{target.name}-{secrets.token_hex(4)}")
        os.rename(target, broken)
        os.rename(temporary, target)
        sync_directory(target.parent)
        remove(broken)
    else:
        os.rename(temporary, target)
        sync_directory(target.parent)


def _prune(
    target: Path, step: int, keep_latest: int, keep_steps: Collection[int], verified: VerifiedCheckpoints
) -> None:
    """Removes the checkpoints up to this step that are older than the newest `keep_latest` valid ones, but none of
    `keep_steps`; later ones (another run's past) stay. All ranks call it."""
    past = on_rank_zero(partial(_past_steps, target.parent, step, keep_steps))
    if len(past) <= keep_latest:
        return
    valid, removable = 0, list(past)
    while removable and valid < keep_latest:
        problem = verified.problem(target.with_name(step_directory(removable.pop(0))))
        if problem is None:
            valid += 1
        elif rank() == 0:
            _log.warning("checkpoint not counted among the %d to keep: %s", keep_latest, problem)
    if rank() == 0:
        _remove([target.with_name(step_directory(number)) for number in removable])


def _past_steps(root: Path, step: int, keep_steps: Collection[int]) -> list[int]:
    """Steps of the checkpoints up to this one without `keep_steps`, newest first; empty if the folder is unreadable."""
    try:
        steps = [directory_step(entry.name) for entry in root.iterdir()]
    except OSError as error:
        _log.warning("%s: old checkpoints could not be listed: %s", root, error)
        return []
    return sorted({number for number in steps if number is not None and number <= step} - {*keep_steps}, reverse=True)


def _remove(directories: Sequence[Path]) -> None:
    for old in directories:
        # Renamed first: a half-removed directory must not look like a checkpoint.
        doomed = old.with_name(f"{_TEMPORARY_PREFIX}pruned-{old.name}-{secrets.token_hex(4)}")
        try:
            os.rename(old, doomed)
            remove(doomed)
        except OSError as error:
            _log.warning("%s: an old checkpoint could not be removed: %s", old.parent, error)
            return
