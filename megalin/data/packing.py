"""From windows of T + 1 ids to a batch: tokens, labels shifted by one, and the documents that the tokens belong to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megalin.parallel.cross_entropy import IGNORED_LABEL


class Batch(NamedTuple):
    """What a model trains on; B samples of T tokens."""

    tokens: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64, -100 = ignored
    document_ids: torch.Tensor  # [B, T] int32, from 0 in each row, never falling
    sample_ids: torch.Tensor  # [B] int64, number of the sample in its split; -1 = padding row


def pack(
    windows: npt.NDArray[np.int64],
    pieces: npt.NDArray[np.int32],
    sample_ids: npt.NDArray[np.int64],
    *,
    isolate_documents: bool,
) -> Batch:
    """Shifts the labels on the whole window, before anything splits it: labels[t] = windows[t + 1].

    Args:
        windows: [B, T + 1] int64, token ids.
        pieces: [B, T + 1] int32, the document of each id, from 0 in each row and never falling. It comes from the
            shard's index, so a text that holds the end-of-document token is not cut there.
        sample_ids: [B] int64.
        isolate_documents: ignore the label after a document's last token (it is the next document's first) and keep
            the documents apart; else every label counts and the row is one document.
    """
    assert windows.shape == pieces.shape, (windows.shape, pieces.shape)
    labels = windows[:, 1:].copy()  # [B, T]
    if isolate_documents:
        labels[pieces[:, 1:] != pieces[:, :-1]] = IGNORED_LABEL
        document_ids = pieces[:, :-1].copy()  # [B, T]
    else:
        document_ids = np.zeros(labels.shape, np.int32)
    return Batch(
        tokens=torch.from_numpy(windows[:, :-1].copy()),
        labels=torch.from_numpy(labels),
        document_ids=torch.from_numpy(document_ids),
        sample_ids=torch.from_numpy(sample_ids),
    )


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Appends rows without a valid label (token 0, sample -1) until there are `rows`."""
    missing = rows - len(batch.sample_ids)
    assert missing >= 0, (rows, len(batch.sample_ids))

    def padded(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])

    return Batch(
        tokens=padded(batch.tokens, 0),
        labels=padded(batch.labels, IGNORED_LABEL),
        document_ids=padded(batch.document_ids, 0),
        sample_ids=padded(batch.sample_ids, -1),
    )
