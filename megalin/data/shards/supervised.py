"""Supervised shards from arrays: documents of token ids, each with the tokens that count as labels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.shards.indexed_dataset import ShardWriter, token_dtype
from megalin.errors import DataError


class SupervisedShard(NamedTuple):
    """Counts of a new shard with a label mask."""

    prefix: str
    documents: int
    tokens: int
    labels: int
    """Tokens that count as labels."""


def write_supervised_shard(
    prefix: str | Path, documents: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]], *, vocab_size: int
) -> SupervisedShard:
    """Writes a shard and its label mask, one sequence a document, as a stream: `documents` may be a generator.

    A token that counts as a label is predicted, from those before it in its document; so a document's first token can
    never be one, whatever its entry says, unless `data.isolate_documents` is false.

    Args:
        prefix: path of the shard without suffix; its folder exists. `PREFIX.bin`, `.idx` and `.mask.bin` are written,
            and no .idx has its name before all of it is on the disk.
        documents: pairs (ids, label mask): ids [tokens] of any integer dtype, the mask [tokens] bool, True where the
            token counts as a label. A pair of empty arrays is a document without a sequence.
        vocab_size: V; ids are in 0 .. V - 1.

    Raises:
        DataError: ids that are not one-dimensional integers or not below V; a mask of another dtype or length.
        StorageError: the files cannot be written; then no .idx has the name.
    """
    labels = 0
    with ShardWriter(prefix, token_dtype(vocab_size), label_mask=True) as writer:
        for number, (ids, mask) in enumerate(documents):
            tokens, counted = _checked(np.asarray(ids), np.asarray(mask), vocab_size, f"{prefix}: document {number}")
            if tokens.size:
                writer.add_sequence(tokens, counted)
            writer.end_document()
            labels += int(np.count_nonzero(counted))
        writer.publish()
    return SupervisedShard(str(prefix), writer.num_documents, writer.num_tokens, labels)


def _checked(
    ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], vocab_size: int, place: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns both arrays of a document; empty lists have no dtype of their own."""
    if ids.shape == mask.shape == (0,):
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"{place}: ids of shape {list(ids.shape)} and dtype {ids.dtype}; give [tokens] of integers")
    if mask.dtype != np.bool_:
        raise DataError(f"{place}: a label mask of dtype {mask.dtype}; give bool, True where a token counts as a label")
    if mask.shape != ids.shape:
        raise DataError(f"{place}: a label mask of shape {list(mask.shape)} for {len(ids)} ids; give one entry an id")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        found = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise DataError(f"{place}: token id {found}; give ids from 0 to vocab_size - 1 = {vocab_size - 1}")
    return ids, mask
