"""Duplicates among signed texts: candidates that share a band are compared and clustered, one band in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.corpus.signatures import Scheme, Signatures, similarity
from megalin.data.corpus.worker_pool import worker_pool

# One entry of a band, including the memory to sort it.
_ENTRY_BYTES = 64
_PAIRS_AT_ONCE = 1 << 16
# Texts of a band are compared with the first of them, those that do not match it with the first of the rest, and so on.
# What is left after this number of rounds shares the band by chance, or was made to waste time.
_ROUNDS = 32

DocumentIds = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.int64]


class SignedPart(NamedTuple):
    """Signature files of a part of the corpus."""

    prefix: Path  # .bands: blocks of [bands, n] uint64; .sketches: [texts, width] uint8
    first: int  # number of its first text in the corpus
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
    remainder: int  # only texts with band hash = remainder (mod divisor)
    divisor: int


def find_duplicates(parts: Sequence[SignedPart], how: Scheme, *, workers: int, memory_bytes: int) -> DocumentIds:
    """Numbers, in ascending order, of the texts linked to an earlier one, directly or through others.

    In each band the texts with the same hash are compared with the first of them; those with a similarity below
    `how.threshold` are compared with the first of these, and so on, 32 times; the rest has no links in this band. A
    link is a matching pair.

    Memory: about `memory_bytes` a worker, and 48 bytes for each link. If the texts do not fit, a band is processed in
    several passes, each with the hashes of one remainder.

    Raises:
        DataError: a worker died.
    """
    total = sum(sum(part.blocks) for part in parts)
    divisor = max(-(-total * _ENTRY_BYTES // memory_bytes), 1)
    tasks = [_Task(parts, how, band, remainder, divisor) for band in range(how.bands) for remainder in range(divisor)]
    if workers == 1:
        pairs = [*map(_links_in_band, tasks)]
    else:
        with worker_pool(workers, limit="--memory") as pool:
            pairs = [*pool.map(_links_in_band, tasks)]
    return _all_but_first(np.concatenate(pairs))


def _links_in_band(task: _Task) -> Pairs:
    """Matching pairs (earlier, later) [m, 2] that share the band."""
    hashes, ids = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for part in task.parts:
        for first, values in _read_band(part, task.how.bands, task.band):
            mine = np.flatnonzero(values % np.uint64(task.divisor) == np.uint64(task.remainder))
            hashes.append(values[mine])
            ids.append(mine + first)

    def matches(one: DocumentIds, other: DocumentIds) -> npt.NDArray[np.bool_]:
        found = [np.empty(0, np.bool_)]
        for first in range(0, len(one), _PAIRS_AT_ONCE):
            pair = slice(first, first + _PAIRS_AT_ONCE)
            left, right = (_sketches(task.parts, ids, task.how.width) for ids in (one[pair], other[pair]))
            found.append(similarity(left, right, task.how) >= task.how.threshold)
        return np.concatenate(found)

    return matching_pairs(np.concatenate(hashes), np.concatenate(ids), matches)


def matching_pairs(
    hashes: npt.NDArray[np.uint64],
    ids: DocumentIds,
    matches: Callable[[DocumentIds, DocumentIds], npt.NDArray[np.bool_]],
) -> Pairs:
    """Pairs [m, 2] of matching texts among those with the same hash.

    In a round all remaining texts are compared, by `matches` (earlier, later), with the first of them that has their
    hash. The next round has those that did not match.
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
        found = matches(leaders, ids)
        pairs.append(np.stack((leaders[found], ids[found]), axis=1))
        ids, hashes = ids[~found], hashes[~found]
    return np.concatenate(pairs)


def _read_band(part: SignedPart, bands: int, band: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yields the number of each block's first text, and the block's hashes in this band."""
    first, offset = part.first, 0
    with open(f"{part.prefix}.bands", "rb", buffering=0) as file:
        for count in part.blocks:
            file.seek(offset + 8 * count * band)
            values = np.fromfile(file, "<u8", count)
            assert len(values) == count, (part.prefix, count, len(values))
            yield first, values
            first, offset = first + count, offset + 8 * count * bands


def _sketches(parts: Sequence[SignedPart], ids: DocumentIds, width: int) -> npt.NDArray[np.uint8]:
    """Sketches [len(ids), width] of these texts; one part is open at a time."""
    found = np.empty((len(ids), width), np.uint8)
    order = np.argsort(ids, kind="stable")
    bounds = np.searchsorted(ids[order], [part.first for part in parts])
    for part, start, end in zip(parts, bounds, [*bounds[1:], len(ids)], strict=True):
        if start < end:
            mine = order[start:end]
            stored = np.memmap(f"{part.prefix}.sketches", np.uint8, "r", shape=(sum(part.blocks), width))
            found[mine] = stored[ids[mine] - part.first]
    return found


def _all_but_first(pairs: Pairs) -> DocumentIds:
    """Nodes, in ascending order, except the smallest of each component in the graph with these edges.

    Label propagation: each node's label falls to the smallest one that is connected to it.
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
