"""Document boundaries of packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class PackedDocuments(NamedTuple):
    """The documents of B sequences of T tokens; `find_documents` fills in `offsets` and `sizes`."""

    ids: Tensor | None
    """[B, T] integers, non-decreasing along T; None if each sequence is one document."""
    offsets: Tensor | None = None
    """int32 [N + 1]: start of each document among the B T tokens of the batch, then B T. N is the number of documents
    padded with empty ones to a power of 4, so that a compiled block is compiled for few sizes."""
    sizes: Tensor | None = None
    """int64 [2] on the CPU: the number of documents, and the tokens of the longest."""


UNPACKED = PackedDocuments(None)
"""Each sequence is one document."""


def find_documents(ids: Tensor) -> PackedDocuments:
    """Documents of ids [B, T]. Synchronises with the device to read their number: call it once per batch."""
    starts = functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)  # [B, T]
    places = starts.cpu().flatten().nonzero()[:, 0]
    count = len(places)
    if count == len(ids):
        return UNPACKED
    size = 1
    while size < count:
        size *= 4
    offsets = functional.pad(places, (0, size + 1 - count), value=ids.numel())
    sizes = torch.stack([torch.tensor(count), offsets.diff().max()])
    return PackedDocuments(ids, offsets.to(ids.device, torch.int32), sizes)
