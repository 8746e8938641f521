"""Verification of checkpoint directories by all ranks, each hashing its part of the files that it shares."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megalin.checkpoint.manifest import Checkpoint, CheckpointManifest, file_problems, files_stamp, read_manifest
from megalin.errors import CheckpointError, MegalinError
from megalin.parallel.agreement import Channel, on_every_rank, on_rank_zero, rank
from megalin.slow_work import slow_work


def check_directory(directory: Path, channel: Channel | None = None) -> Checkpoint | str:
    """The checkpoint in a directory, or the reason why it is not valid. A broadcast and two all-gathers, through the
    channel if there is one.

    Ranks that find the very same files there share the hashing; on a disk of its own, a host hashes all of them.

    Raises:
        CheckpointError: on every rank, where the files are valid for some ranks and not for others.
    """
    try:
        manifest = on_rank_zero(partial(read_manifest, directory), CheckpointManifest, channel=channel)
        stamps = on_every_rank(partial(files_stamp, directory), channel=channel)
        sharing = [number for number, stamp in enumerate(stamps) if stamp == stamps[rank()]]
        check = partial(file_problems, directory, manifest, part=sharing.index(rank()), num_parts=len(sharing))
        if channel is not None:
            found = on_every_rank(partial(check, on_file=channel.beat), channel=channel)
        else:
            with slow_work(f"verifying {directory}", shown=rank() == 0):
                found = on_every_rank(check)
    except MegalinError as error:
        return f"{directory}: {error}"
    reasons = {stamp: list[str]() for stamp in stamps}
    for stamp, problems in zip(stamps, found, strict=True):
        reasons[stamp] += problems
    if not any(reasons.values()):
        return Checkpoint(directory, manifest, stamps[rank()])
    if not all(reasons.values()):
        bad = next(number for number, stamp in enumerate(stamps) if reasons[stamp])
        raise CheckpointError(
            f"{directory} differs between ranks: on rank {bad}, {'; '.join(reasons[stamps[bad]])}; give all hosts the "
            "same folder, or a copy of it"
        )
    return f"{directory}: {'; '.join(reasons[stamps[0]])}"


class VerifiedCheckpoints:
    """Checkpoints that this run has found valid; one is hashed again when the size or time of a file has changed."""

    def __init__(self) -> None:
        self._stamps: dict[Path, str] = {}  # on rank 0

    def problem(self, directory: Path, channel: Channel | None = None) -> str | None:
        """The reason why the checkpoint in `directory` is not valid; None if it is. All ranks call it: one broadcast,
        and where it must be hashed those of `check_directory`."""
        stamp = on_rank_zero(partial(files_stamp, directory), channel=channel)
        if stamp and self._stamps.get(directory) == stamp:
            return None
        checked = check_directory(directory, channel)
        if isinstance(checked, str):
            return checked
        self._stamps[directory] = stamp
        return None
