"""Documents of a split over all its shards, for datasets that make samples of whole documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.shards.indexed_dataset import Shard


class SplitDocuments(NamedTuple):
    """Documents of a split with enough tokens. Memory: 20 bytes a document."""

    shards: list[Shard]
    shard: npt.NDArray[np.int32]  # [documents] number of the shard
    first_token: npt.NDArray[np.int64]  # [documents] of the shard
    length: npt.NDArray[np.int64]  # [documents] tokens
    skipped: int  # documents of fewer tokens


def find_documents(parts: Sequence[tuple[Shard, int, int]], *, least_tokens: int) -> SplitDocuments:
    """Documents of at least `least_tokens` (1 or more) in the sequences [first, end) of each shard; one cut by a split
    boundary counts as two."""
    shard_numbers, first_tokens, lengths, skipped = [], [], [], 0
    for number, (shard, first, end) in enumerate(parts):
        edges = np.unique(np.clip(shard.documents, first, end))  # documents without a sequence fall together
        starts = shard.pointers[np.minimum(edges, shard.num_sequences - 1)] // shard.dtype.itemsize
        starts[edges == shard.num_sequences] = shard.num_tokens
        sizes = np.diff(starts)
        usable = sizes >= least_tokens
        begins = shard.documents[:-1]
        inside = (begins >= first) & ((begins < end) | (end == shard.num_sequences))
        empty = inside & (np.diff(shard.documents) == 0)
        skipped += int(empty.sum()) + int((~usable).sum())
        shard_numbers.append(np.full(int(usable.sum()), number, np.int32))
        first_tokens.append(starts[:-1][usable])
        lengths.append(sizes[usable])
    return SplitDocuments(
        [shard for shard, _, _ in parts],
        np.concatenate([np.empty(0, np.int32), *shard_numbers]),
        np.concatenate([np.empty(0, np.int64), *first_tokens]),
        np.concatenate([np.empty(0, np.int64), *lengths]),
        skipped,
    )
