"""Verification of checkpoint directories by all ranks, each hashing its part of the files."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from megalin.checkpoint.manifest import Checkpoint, CheckpointManifest, file_problems, read_manifest
from megalin.errors import MegalinError
from megalin.parallel.agreement import Channel, on_every_rank, on_rank_zero, rank, world_size
from megalin.slow_work import slow_work

_Stamp = list[tuple[str, int, int]]
"""Name, size and time of change of each file of a directory."""


def check_directory(directory: Path, channel: Channel | None = None) -> Checkpoint | str:
    """The checkpoint in a directory, or the reason why it is not valid. A broadcast and an all-gather, through the
    channel if there is one."""
    try:
        manifest = on_rank_zero(partial(read_manifest, directory), CheckpointManifest, channel=channel)
        check = partial(file_problems, directory, manifest, part=rank(), num_parts=world_size())
        if channel is not None:
            found = on_every_rank(partial(check, on_file=channel.beat), channel=channel)
        else:
            with slow_work(f"verifying {directory}", shown=rank() == 0):
                found = on_every_rank(check)
    except MegalinError as error:
        found = [[str(error)]]
    reasons = [reason for of_rank in found for reason in of_rank]
    return f"{directory}: {'; '.join(reasons)}" if reasons else Checkpoint(directory, manifest)


class VerifiedCheckpoints:
    """Checkpoints that this run has found valid; one is hashed again when the size or time of a file has changed."""

    def __init__(self) -> None:
        self._stamps: dict[Path, _Stamp] = {}  # on rank 0

    def problem(self, directory: Path, channel: Channel | None = None) -> str | None:
        """The reason why the checkpoint in `directory` is not valid; None if it is. All ranks call it: one broadcast,
        and where it must be hashed those of `check_directory`."""
        stamp = on_rank_zero(partial(_stamp, directory), _Stamp, channel=channel)
        if stamp and self._stamps.get(directory) == stamp:
            return None
        checked = check_directory(directory, channel)
        if isinstance(checked, str):
            return checked
        self._stamps[directory] = stamp
        return None


def _stamp(directory: Path) -> _Stamp:
    """Empty if the directory cannot be read."""
    try:
        with os.scandir(directory) as entries:
            stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
