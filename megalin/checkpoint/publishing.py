"""Publishing of checkpoints: the temporary directory before, one rename, and the removal of old ones after it."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

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
from megalin.checkpoint.verification import VerifiedCheckpoints
from megalin.errors import CheckpointError, StorageError
from megalin.files import FolderInUseError, FolderLock, remove, sync_directory, write_new
from megalin.parallel.agreement import Channel, on_rank_zero, rank

_TEMPORARY_PREFIX = ".tmp-"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


class Publication(NamedTuple):
    """A checkpoint to publish, and those that stay after it."""

    target: Path
    step: int
    document: bytes
    """Content of train_state.json."""
    num_bytes: int
    """Size of its tensors, for messages."""
    keep_latest: int | None
    keep_steps: Collection[int]
    verified: VerifiedCheckpoints


def prepare(
    root: str | Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep_latest: int | None = None,
    keep_steps: Collection[int] = (),
    verified: VerifiedCheckpoints | None = None,
) -> Publication:
    """The publication of these tensors, with the arguments of `save`. Raises TypeError for a dtype that cannot be
    saved."""
    assert keep_latest is None or keep_latest >= 1, keep_latest
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} is a {getattr(tensor, 'dtype', type(tensor))}: only tensors of a supported dtype can be saved"
            )
    return Publication(
        Path(root) / step_directory(step),
        step,
        json.dumps(dict(state), allow_nan=False, indent=1).encode(),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        keep_latest,
        keep_steps,
        verified or VerifiedCheckpoints(),
    )


def begin(publication: Publication, locks: list[FolderLock]) -> Path | None:
    """Rank 0: locks the root, removes leftovers of failed saves, makes the temporary directory; None if published."""
    target = publication.target
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
        if error.errno in _NO_SPACE:
            raise storage_failure(publication, str(error), free_space(root)) from None
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


def free_space(root: Path) -> str:
    """The free bytes of the file system of `root`, as text."""
    try:
        return f"{shutil.disk_usage(root).free:,} bytes are free there"
    except OSError as error:
        return f"its free space is unknown ({error})"


def publish(publication: Publication, temporary: Path, files: dict[str, FileRecord]) -> None:
    """Rank 0, after all ranks have written: writes state and manifest, and renames. Raises OSError."""
    target = publication.target
    write_new(temporary / STATE_FILE, publication.document)
    files = {**files, STATE_FILE: FileRecord.of(publication.document)}
    for name, record in files.items():
        size = (temporary / name).stat().st_size
        if size != record.size:
            raise OSError(f"{temporary / name}: {size} bytes, but {record.size} were written")
    manifest = CheckpointManifest(step=publication.step, files=dict(sorted(files.items())))
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


def storage_failure(publication: Publication, causes: str, free: str) -> StorageError:
    """The error of a checkpoint that could not be written, for these causes and free bytes."""
    return StorageError(
        f"cannot save to {publication.target.parent}: {causes}; the checkpoint needs about {publication.num_bytes:,} "
        f"bytes and {free}; earlier checkpoints are untouched; free space, or keep fewer checkpoints"
    )


def prune(publication: Publication, channel: Channel | None = None) -> None:
    """Removes the checkpoints up to this step that are older than the newest `keep_latest` valid ones, but none of
    `keep_steps`; later ones (another run's past) stay. All ranks call it."""
    target, _, _, _, keep_latest, keep_steps, verified = publication
    if keep_latest is None:
        return
    past = on_rank_zero(partial(_past_steps, target.parent, publication.step, keep_steps), channel=channel)
    if len(past) <= keep_latest:
        return
    valid, removable = 0, list(past)
    while removable and valid < keep_latest:
        problem = verified.problem(target.with_name(step_directory(removable.pop(0))), channel)
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


def remove_between(root: Path, first: int, end: int) -> None:
    """Rank 0: removes the checkpoints of more than `first` and fewer than `end` steps. Raises OSError."""
    for step in range(first + 1, end):
        if os.path.lexists(directory := root / step_directory(step)):
            _log.warning("%s: removed, as its steps are undone", directory)
            _remove_one(directory)


def _remove_one(directory: Path) -> None:
    # Renamed first: a half-removed directory must not look like a checkpoint.
    doomed = directory.with_name(f"{_TEMPORARY_PREFIX}pruned-{directory.name}-{secrets.token_hex(4)}")
    os.rename(directory, doomed)
    sync_directory(directory.parent)
    remove(doomed)


def _remove(directories: Sequence[Path]) -> None:
    for old in directories:
        try:
            _remove_one(old)
        except OSError as error:
            _log.warning("%s: an old checkpoint could not be removed: %s", old.parent, error)
            return
