"""The ledger of a run: for each step a digest of the token ids it trained on, equal on every mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megalin.errors import DataError
from megalin.files import read_limited
from megalin.parallel.agreement import on_rank_zero
from megalin.train.jsonl import JsonLines

_LIMIT_BYTES = 4 << 30
LEDGER_NAME = "ledger.jsonl"
"""Name of the file in the run folder."""


class Ledger:
    """Writer of a run's ledger, one JSON line per step: {"step": finished steps, "digest": 32 hex digits}.

    A step's digest is the sum, modulo 2^64 in each half, of a hash of each sample's place in the step and its token
    ids: it does not depend on the mesh, the micro-batches or the threads. Lines of an earlier process beyond
    `resumed_step` are removed.
    """

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        """Opens the file on rank 0; every rank creates one (one broadcast). Raises StorageError on every rank."""
        self._file: JsonLines | None = None
        on_rank_zero(lambda: self._open(path, resumed_step))

    def _open(self, path: Path, resumed_step: int) -> None:
        self._file = JsonLines(path, resumed_step=resumed_step)

    def write(self, step: int, digest: Tensor) -> None:
        """Appends the line of `step`, whose digest is [2] int64; does nothing on ranks other than 0."""
        if self._file is not None:
            halves = [f"{half % 2**64:016x}" for half in digest.tolist()]
            self._file.write(step, {"digest": "".join(halves)})

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


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
