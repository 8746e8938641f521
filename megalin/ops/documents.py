"""Where the documents of packed rows lie, as the host knows it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Documents(NamedTuple):
    """The documents of B rows of T tokens."""

    ids: Tensor | None
    """[B, T], non-decreasing along T; None when each row is one document."""
    offsets: Tensor | None
    """int32 [N + 1], where documents start among the B T tokens of all rows, then B T. N is their number rounded up to
    a power of 4, the rest being empty documents at the end, so that a compiled block meets few sizes. None when each
    row is one document, or where nobody looked."""


def find_documents(ids: Tensor) -> Documents:
    """The documents of ids [B, T]. Waits for the device, which alone knows their number: call it once a batch."""
    starts = functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)  # [B, T]
    places = starts.flatten().nonzero()[:, 0].to(torch.int32)
    if len(places) == len(ids):
        return Documents(None, None)
    size = 1
    while size < len(places):
        size *= 4
    return Documents(ids, functional.pad(places, (0, size + 1 - len(places)), value=ids.numel()))
