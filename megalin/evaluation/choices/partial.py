"""Partial scores of a task in the run folder, from which an evaluation that was killed goes on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.errors import DataError, MegalinError
from megalin.files import read_input, storage_errors, write_atomically
from megalin.parallel.agreement import on_rank_zero, rank

EVERY_BATCHES = 8
"""Batches between sums over all ranks."""
_EVERY_SECONDS = 30.0  # between writes
_LIMIT_BYTES = 1 << 28
_log = logging.getLogger(__name__)


class PartialSums(NamedTuple):
    """Sums over the first batches of a task and over all ranks, in host memory."""

    batches: int
    nats: Tensor
    """[N] float64 of each request."""
    counts: Tensor
    """[2, N] int64: answer tokens, and those of them that are the likeliest."""


class PartialScores:
    """The file of a task's partial sums.

    Every request is scored within one batch. Sums over the first batches and over the others are therefore 0 in one of
    the two for each request, and their sum is bit for bit that of all batches.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """`identity`: everything that the results and their batches depend on, as JSON. Sums of another one are not
        read."""
        self._path, self._identity = path, dict(identity)
        self._written = time.monotonic()

    def read(self, num_requests: int, num_batches: int) -> PartialSums:
        """The sums of an earlier evaluation on every rank; zeros of no batch where there are none. A collective."""
        batches, nats, counts = on_rank_zero(lambda: self._read(num_requests, num_batches))
        return PartialSums(
            batches, torch.tensor(nats, dtype=torch.float64), torch.tensor(counts, dtype=torch.int64).view(2, -1)
        )

    def _read(self, num_requests: int, num_batches: int) -> tuple[int, list[float], list[list[int]]]:
        nothing = 0, [0.0] * num_requests, [[0] * num_requests] * 2
        if not self._path.exists():
            return nothing
        try:
            values: Any = json.loads(read_input(self._path, limit_bytes=_LIMIT_BYTES, remedy="remove it"))
            if values["identity"] != self._identity | {"batches": num_batches}:
                return nothing
            batches, nats, counts = int(values["batches"]), values["nats"], values["counts"]
            if not 0 <= batches <= num_batches or [len(each) for each in (nats, *counts)] != [num_requests] * 3:
                raise ValueError(f"{batches} batches of {len(nats)} requests")
            return batches, [float(value) for value in nats], [[int(value) for value in each] for each in counts]
        except (DataError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("%s: not partial scores: %s; the task starts again", self._path, error)
            return nothing

    def write(self, sums: PartialSums, num_batches: int) -> None:
        """Writes the sums on rank 0, at most once in 30 seconds; a failure is a warning."""
        if rank() > 0 or time.monotonic() - self._written < _EVERY_SECONDS:
            return
        self._written = time.monotonic()
        values = {
            "identity": self._identity | {"batches": num_batches},
            "batches": sums.batches,
            "nats": sums.nats.tolist(),
            "counts": sums.counts.tolist(),
        }
        self._change(lambda: write_atomically(self._path, json.dumps(values).encode()))

    def remove(self) -> None:
        """Removes the file on rank 0, when the task's result is there; a failure is a warning."""
        if rank() == 0 and self._path.exists():
            self._change(self._path.unlink)

    def _change(self, work: Callable[[], None]) -> None:
        try:
            with storage_errors(self._path):
                self._path.parent.mkdir(exist_ok=True)
                work()
        except MegalinError as error:
            _log.warning("the partial scores are not kept: %s", error)
