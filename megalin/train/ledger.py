"""The ledger of a run: for each step a digest of the token ids it trained on, equal on every mesh."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megalin.errors import DataError
from megalin.files import read_limited
from megalin.parallel.agreement import on_rank_zero
from megalin.train.jsonl import JsonLines, read_records

_LIMIT_BYTES = 4 << 30
LEDGER_NAME = "ledger.jsonl"
"""Name of the file in the run folder."""

_log = logging.getLogger(__name__)


class Ledger:
    """Writer of a run's ledger, one JSON line per step: {"step": finished steps, "digest": 32 hex digits}, with
    "skipped": 1 where the update was left out, and after a rollback "batch": the number of its batch in the sample
    order, which is the step plus the batches left out so far.

    A step's digest is the sum, modulo 2^64 in each half, of a hash of each sample's place in the step and its token
    ids: it does not depend on the mesh, the micro-batches or the threads. Lines of an earlier process beyond
    `resumed_step` are removed. Lines that a full disk did not take are written as soon as it does.
    """

    def __init__(self, path: Path, *, resumed_step: int, is_branch: bool = False) -> None:
        """Opens the file on rank 0; every rank creates one (one broadcast).

        Args:
            is_branch: the first `resumed_step` steps may be another run's.

        Raises:
            StorageError: on every rank, if the file cannot be opened.
            DataError: on every rank, if lines of finished steps are missing.
        """
        self._file: JsonLines | None = None
        self._waiting: deque[tuple[int, dict[str, int | str]]] = deque()
        on_rank_zero(lambda: self._open(path, resumed_step, is_branch))

    def _open(self, path: Path, resumed_step: int, is_branch: bool) -> None:
        if path.exists():
            _check_complete(path, resumed_step)
        elif resumed_step and not is_branch:
            _log.warning("%s: missing; the run continues with a new one, from step %d on", path, resumed_step + 1)
        self._file = JsonLines(path, resumed_step=resumed_step)

    def write(self, step: int, digest: Tensor, *, skipped: bool = False, batch: int | None = None) -> None:
        """Appends the line of `step`, whose digest is [2] int64 and whose batch is left out if it is the step's number;
        does nothing on ranks other than 0."""
        if self._file is not None:
            text = "".join(f"{half % 2**64:016x}" for half in digest.tolist())
            moved = {} if batch in (None, step) else {"batch": batch}
            self._waiting.append((step, {"digest": text} | moved | ({"skipped": 1} if skipped else {})))
            while self._waiting and self._file.write(*self._waiting[0]):
                self._waiting.popleft()

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps, which are undone; a collective. Raises StorageError on every rank."""
        on_rank_zero(lambda: self._rewind(step))

    def _rewind(self, step: int) -> None:
        if self._file is not None:
            self._waiting = deque(line for line in self._waiting if line[0] <= step)
            self._file.rewind(step)

    def sync(self) -> None:
        """Flushes the lines to the disk, before a checkpoint of their steps is saved."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _check_complete(path: Path, resumed_step: int) -> None:
    """Checks that the ledger has every step from its first one to `resumed_step`.

    Raises:
        DataError: steps are missing.
    """
    recorded = [record["step"] for record in read_records(path)]
    if recorded and recorded[0] > resumed_step:  # of a branch that ended before its first checkpoint
        return
    known = {*recorded}
    first = recorded[0] if recorded else 1
    missing = [step for step in range(first, resumed_step + 1) if step not in known]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of the {resumed_step} finished steps of the checkpoint are missing, from step "
            f"{missing[0]} to {missing[-1]}; restore the file, or move it away to continue with a new one"
        )


class LedgerComparison(NamedTuple):
    """Result of comparing two ledgers."""

    steps: int
    """Number of steps in both ledgers."""
    first_difference: int | None
    """First common step whose samples differ; None without one."""
    only_first: int
    """Number of steps in the first ledger only."""
    only_second: int
    """Number of steps in the second ledger only."""


def compare_ledgers(first: str | Path, second: str | Path) -> LedgerComparison:
    """Compares two ledgers, each a file or a run folder, step by step.

    Raises:
        DataError: a file that cannot be read or is not a ledger, or two ledgers without a step in common.
    """
    ours, theirs = dict(_read(Path(first))), dict(_read(Path(second)))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise DataError(f"{first} and {second} have no step in common; give ledgers that cover the same steps")
    difference = next((step for step in common if ours[step] != theirs[step]), None)
    return LedgerComparison(len(common), difference, len(ours.keys() - common), len(theirs.keys() - common))


def _read(path: Path) -> Iterator[tuple[int, str]]:
    if path.is_dir():
        path = path / LEDGER_NAME
    try:
        data = read_limited(path, limit_bytes=_LIMIT_BYTES, follow_links=True)
        lines = data.decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a ledger file or a run folder") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            yield int(record["step"]), str(record["digest"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                f"{path}: line {number} is not a ledger record; give a ledger file or a run folder"
            ) from None
