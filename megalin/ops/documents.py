"""Where the documents of packed rows lie, as the host knows it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Documents(NamedTuple):
    """The documents of B rows of T tokens; nothing is known of where they start unless `find_documents` looked."""

    ids: Tensor | None
    """[B, T] integers, non-decreasing along T; None when each row is one document."""
    offsets: Tensor | None = None
    """int32 [N + 1], where documents start among the B T tokens of all rows, then B T. N is their number rounded up to
    a power of 4, the rest being empty documents at the end, so that a compiled block meets few sizes."""
    sizes: Tensor | None = None
    """int64 [2] in the host's memory: the number of documents, and the tokens of the longest."""


WHOLE_ROWS = Documents(None)
"""Each row is one document."""


def find_documents(ids: Tensor) -> Documents:
    """The documents of ids [B, T]. Waits for the device, which alone knows their number: call it once a batch."""
    starts = functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)  # [B, T]
    places = starts.cpu().flatten().nonzero()[:, 0]
    count = len(places)
    if count == len(ids):
        return WHOLE_ROWS
    size = 1
    while size < count:
        size *= 4
    offsets = functional.pad(places, (0, size + 1 - count), value=ids.numel())
    sizes = torch.stack([torch.tensor(count), offsets.diff().max()])
    return Documents(ids, offsets.to(ids.device, torch.int32), sizes)
