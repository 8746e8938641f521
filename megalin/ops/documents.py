"""Document boundaries of packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary


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


_ON_HOST = WeakTensorKeyDictionary()
"""Document ids on a device -> the same ids on the CPU, while the former live."""


def keep_on_host(ids: Tensor, host: Tensor) -> None:
    """Declares that `ids` on a device, which nothing writes from here on, equal `host`: `find_documents` reads that,
    if it is on the CPU."""
    if host.device.type == "cpu" and host is not ids:
        _ON_HOST[ids] = host


def find_documents(ids: Tensor) -> PackedDocuments:
    """Documents of ids [B, T]: call it once per batch. Without `keep_on_host` it waits for all work of the device."""
    host = _ON_HOST[ids] if ids in _ON_HOST else ids.cpu()
    starts = functional.pad(host[:, 1:] != host[:, :-1], (1, 0), value=True)  # [B, T]
    places = starts.flatten().nonzero()[:, 0]
    count = len(places)
    if count == len(ids):
        return UNPACKED
    size = 1
    while size < count:
        size *= 4
    offsets = functional.pad(places, (0, size + 1 - count), value=ids.numel()).to(torch.int32)
    sizes = torch.stack([torch.tensor(count), offsets.diff().max().long()])
    if ids.is_cuda:
        offsets = offsets.pin_memory()  # a copy from other memory waits for the device
    return PackedDocuments(ids, offsets.to(ids.device, non_blocking=True), sizes)
