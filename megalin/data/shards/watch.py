"""Watch over the shards that a run reads: bytes that change after their verification end the run."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

from megalin.data.shards.digests import ShardDigests, num_blocks
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.shards.verification import check_digests
from megalin.errors import DataError, MegalinError

_HASHING_FRACTION, _STAMPS_FRACTION = 0.009, 0.001
"""Largest fractions of the time in which the ranks that share files hash a block, and a rank compares stamps."""
_LEAST_PAUSE_SECONDS = 0.5
_LONGEST_END_SECONDS = 5.0
_REMEDY = (
    "it changed while the run read it, so the steps since then may have read other tokens; restore it, and run the "
    "same command to continue from the newest checkpoint"
)
_log = logging.getLogger(__name__)


class _Stamp(NamedTuple):
    """State of an open file: a write changes both times, a new mode, owner or name the second one alone."""

    size: int
    written_ns: int
    changed_ns: int


class KnownDigests(NamedTuple):
    """Digests of a shard, and their origin for messages."""

    digests: ShardDigests
    origin: str


class ShardWatch:
    """Compares the shards of a run with their digests while the run reads them.

    Two changes are found. A write to a file changes its stamp (size, times of the last write and change), which is
    compared every half second and by `check`, before a checkpoint: then all blocks are read again. Bytes that change
    without a stamp, as on a failing disk or by another host of a network file system, are found by a thread that hashes
    one block after the other, for at most 1 % of the time; a block without a digest is compared from its second time
    on. Ranks that read the very same files share the blocks and the time.

    A file that was replaced by another of its name is no change: the run goes on with the one that it has open.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Takes the stamps; call it before the verification reads the files."""
        self._shards = list(shards)
        self._stamps = [_stamps(shard) for shard in shards]
        self._known: list[KnownDigests] | None = None
        self._place, self._ranks = 0, 1
        self._lock, self._end = threading.Lock(), threading.Event()
        self._problem: MegalinError | None = None
        self._thread: threading.Thread | None = None
        self._touched: set[int] = set()

    def set_known(self, known: Sequence[KnownDigests], *, place: int, ranks: int) -> None:
        """Sets the digests to compare with, of each shard in order; without them stamps alone are compared.

        Args:
            place, ranks: this rank's place among those that opened the very same files, and their number.
        """
        self._known, self._place, self._ranks = list(known), place, ranks

    def check(self) -> None:
        """Compares the stamps, and reads shards with another one again. Raises DataError, as `raise_problem`."""
        with self._lock:
            self.raise_problem()
            try:
                for index in range(len(self._shards)):
                    self._compare_stamps(index)
            except MegalinError as error:
                self._problem = error
                raise

    def raise_problem(self) -> None:
        """Raises the error of an earlier comparison, if there is one.

        Raises:
            DataError: bytes that changed; names the file, the block, both digests and the remedy.
        """
        if self._problem is not None:
            raise self._problem

    def _compare_stamps(self, index: int) -> None:
        """Accepts a shard with another stamp if its bytes are the same."""
        shard, before, now = self._shards[index], self._stamps[index], _stamps(self._shards[index])
        if now == before:
            return
        blocks, known = self._own_blocks(index), None if self._known is None else self._known[index].digests.blocks
        unknown = [number for number in blocks if known is None or number not in known]
        for (path, _), old, new in zip(shard.files(), before, now, strict=True):
            if old.size != new.size:
                raise DataError(f"{path}: expected {old.size} bytes, as on open; found {new.size}; {_REMEDY}")
            if old.written_ns != new.written_ns and unknown:
                raise DataError(
                    f"{path}: was written while the run reads it, and {len(unknown)} of its blocks have no known "
                    f"digest, so its bytes may be others; restore it, and run the same command to continue from the "
                    f"newest checkpoint. With digests (megalin data inspect {shard.prefix} --digest) and data.verify "
                    "on, equal bytes are accepted"
                )
        if self._known is not None:
            self._compare(index, blocks)
            self._compare_mask(index)
        if self._place == 0 and index not in self._touched:
            self._touched.add(index)
            _log.warning("%s: its files were touched while the run reads them, with the same bytes", shard.prefix)
        self._stamps[index] = now

    def _own_blocks(self, index: int) -> range:
        return range(self._place, num_blocks(self._shards[index].bin_bytes), self._ranks)

    def _compare(self, index: int, blocks: Iterable[int]) -> None:
        """Hashes blocks of a shard; compares them, or keeps the digests of those that were unknown."""
        assert self._known is not None
        shard, known = self._shards[index], self._known[index]
        for number in blocks:
            found = {number: shard.block_digest(number)}
            check_digests(shard.prefix, known.digests._replace(blocks=found), known.digests, known.origin, _REMEDY)
            known.digests.blocks.setdefault(number, found[number])

    def _compare_mask(self, index: int) -> None:
        """Hashes the label mask of a shard, if it has one, and compares it."""
        assert self._known is not None
        shard, known = self._shards[index], self._known[index]
        if shard.label_mask is not None:
            found = known.digests._replace(blocks={}, mask=shard.label_mask.read_digest())
            check_digests(shard.prefix, found, known.digests, known.origin, _REMEDY)

    def _work(self) -> Iterator[Callable[[], None]]:
        """Comparisons of this rank, one block or mask each, again and again; none if it has no blocks."""
        own: list[Callable[[], None]] = []
        for index in range(len(self._shards)) if self._known is not None else ():
            own += [partial(self._compare, index, [number]) for number in self._own_blocks(index)]
            own += [partial(self._compare_mask, index)] if self._place == 0 else []
        return itertools.cycle(own)

    def _run(self) -> None:
        """Body of the thread."""
        work, pause, next_hash = self._work(), _LEAST_PAUSE_SECONDS, 0.0
        while not self._end.wait(pause):
            try:
                started = time.monotonic()
                self.check()
                checked = time.monotonic()
                if checked >= next_hash:
                    with self._lock:
                        next(work, lambda: None)()
                    ended = time.monotonic()
                    next_hash = ended + (ended - checked) * self._ranks / _HASHING_FRACTION
            except MegalinError as error:
                self._problem = error
                return
            pause = max(_LEAST_PAUSE_SECONDS, (checked - started) / _STAMPS_FRACTION)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="megalin-shards", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(_LONGEST_END_SECONDS)  # not for a read that hangs


def _stamps(shard: Shard) -> list[_Stamp]:
    """Stamps of the shard's open files. Raises DataError."""
    stamps = []
    for path, file in shard.files():
        try:
            status = os.fstat(file.fileno())
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; check the file system") from None
        stamps.append(_Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return stamps
