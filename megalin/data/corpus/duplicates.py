"""Which of many signed texts are alike: pairs that share a band, compared and joined; all but a band stay on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.corpus.signatures import Scheme, Signatures, similarity
from megalin.data.corpus.worker_pool import worker_pool

# One entry of a band with what sorting it takes.
_ENTRY_BYTES = 64
_PAIRS_AT_ONCE = 1 << 16
# Texts of a band are compared with the first of them, those that are not like it with the first of the rest, and so
# on. What is left after so many rounds shares a band by chance, or was made to waste the time of who reads it.
_ROUNDS = 32

DocumentIds = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.int64]


class SignedPart(NamedTuple):
    """Where the signatures of a part of the corpus stand."""

    prefix: Path  # .bands: blocks of [bands, n] uint64; .sketches: [texts, width] uint8
    first: int  # number of its first text, counted over the corpus
    blocks: Sequence[int]  # n of each block


def append_signatures(prefix: Path, signatures: Signatures) -> None:
    """Appends a block to the files of a part. Raises OSError."""
    with open(f"{prefix}.bands", "ab") as bands, open(f"{prefix}.sketches", "ab") as sketches:
        bands.write(np.ascontiguousarray(signatures.bands.T).data)
        sketches.write(np.ascontiguousarray(signatures.sketches).data)


class _Task(NamedTuple):
    parts: Sequence[SignedPart]
    how: Scheme
    band: int
    remainder: int  # only texts whose band leaves it
    divisor: int


def find_duplicates(parts: Sequence[SignedPart], how: Scheme, *, workers: int, memory_bytes: int) -> DocumentIds:
    """Texts that are linked to an earlier one, directly or over others; their numbers, in ascending order.

    In each band the texts of equal hash are compared with the first of them, those that agree with it to less than
    `how.threshold` with the first of these, and so on, 32 times; what is left then has no links in this band. A link
    is a pair that agrees.

    Memory: about `memory_bytes` a worker, and 48 bytes for each link. A corpus with more texts than fit is gone through
    several times, each time with the bands of one remainder.

    Raises:
        DataError: a worker died.
    """
    total = sum(sum(part.blocks) for part in parts)
    divisor = max(-(-total * _ENTRY_BYTES // memory_bytes), 1)
    tasks = [_Task(parts, how, band, remainder, divisor) for band in range(how.bands) for remainder in range(divisor)]
    if workers == 1:
        pairs = [*map(_alike_in_band, tasks)]
    else:
        with worker_pool(workers, limit="--memory") as pool:
            pairs = [*pool.map(_alike_in_band, tasks)]
    return _all_but_first(np.concatenate(pairs))


def _alike_in_band(task: _Task) -> Pairs:
    """[m, 2]: pairs (earlier, later) that share the band and are alike."""
    hashes, ids = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for part in task.parts:
        for first, values in _read_band(part, task.how.bands, task.band):
            mine = np.flatnonzero(values % np.uint64(task.divisor) == np.uint64(task.remainder))
            hashes.append(values[mine])
            ids.append(mine + first)

    def alike(one: DocumentIds, other: DocumentIds) -> npt.NDArray[np.bool_]:
        found = [np.empty(0, np.bool_)]
        for first in range(0, len(one), _PAIRS_AT_ONCE):
            pair = slice(first, first + _PAIRS_AT_ONCE)
            left, right = (_sketches(task.parts, ids, task.how.width) for ids in (one[pair], other[pair]))
            found.append(similarity(left, right, task.how) >= task.how.threshold)
        return np.concatenate(found)

    return matching_pairs(np.concatenate(hashes), np.concatenate(ids), alike)


def matching_pairs(
    hashes: npt.NDArray[np.uint64], ids: DocumentIds, alike: Callable[[DocumentIds, DocumentIds], npt.NDArray[np.bool_]]
) -> Pairs:
    """[m, 2]: among texts of equal hash, each with the one that a round compared it with and that it is like.

    In a round all texts that are left are compared, as `alike` (earlier, later), with the first of them that has their
    hash. The next round has those that were not like it.
    """
    order = np.lexsort((ids, hashes))
    hashes, ids = hashes[order], ids[order]
    pairs = [np.empty((0, 2), np.int64)]
    for _ in range(_ROUNDS):
        starts = (
            np.flatnonzero(np.concatenate(([True], hashes[1:] != hashes[:-1]))) if len(hashes) else np.empty(0, int)
        )
        counts = np.diff(np.append(starts, len(hashes)))
        leaders = np.repeat(ids[starts], counts)
        rest = leaders != ids
        leaders, ids, hashes = leaders[rest], ids[rest], hashes[rest]
        if not len(ids):
            break
        found = alike(leaders, ids)
        pairs.append(np.stack((leaders[found], ids[found]), axis=1))
        ids, hashes = ids[~found], hashes[~found]
    return np.concatenate(pairs)


def _read_band(part: SignedPart, bands: int, band: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """The band of each block, and the number of the block's first text."""
    first, offset = part.first, 0
    with open(f"{part.prefix}.bands", "rb", buffering=0) as file:
        for count in part.blocks:
            file.seek(offset + 8 * count * band)
            values = np.fromfile(file, "<u8", count)
            assert len(values) == count, (part.prefix, count, len(values))
            yield first, values
            first, offset = first + count, offset + 8 * count * bands


def _sketches(parts: Sequence[SignedPart], ids: DocumentIds, width: int) -> npt.NDArray[np.uint8]:
    """[len(ids), width]: the sketches of these texts; one part is open at a time."""
    found = np.empty((len(ids), width), np.uint8)
    order = np.argsort(ids, kind="stable")
    borders = np.searchsorted(ids[order], [part.first for part in parts])
    for part, start, end in zip(parts, borders, [*borders[1:], len(ids)], strict=True):
        if start < end:
            mine = order[start:end]
            stored = np.memmap(f"{part.prefix}.sketches", np.uint8, "r", shape=(sum(part.blocks), width))
            found[mine] = stored[ids[mine] - part.first]
    return found


def _all_but_first(pairs: Pairs) -> DocumentIds:
    """The nodes, in ascending order, that are not the least of their component in the graph with these edges.

    Each node's label falls to the least that it reaches.
    """
    nodes, edges = np.unique(pairs, return_inverse=True)
    one, other = edges.reshape(-1, 2).T
    labels = np.arange(len(nodes))
    while True:
        least = labels.copy()
        low = np.minimum(labels[one], labels[other])
        np.minimum.at(least, labels[one], low)
        np.minimum.at(least, labels[other], low)
        while not np.array_equal(jumped := least[least], least):
            least = jumped
        if np.array_equal(least, labels):
            break
        labels = least
    return nodes[labels != np.arange(len(nodes))]
