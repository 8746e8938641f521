"""Document boundaries of packed sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary


class DocumentBounds(NamedTuple):
    """Upper bounds of the documents of packed sequences: the launches of kernels depend on these alone."""

    documents: int
    """Number of documents; with more than there are, the last ones are empty."""
    longest: int
    """Tokens of the longest document."""

    def covers(self, other: DocumentBounds) -> bool:
        """Whether documents within `other` are within these bounds."""
        return other.documents <= self.documents and other.longest <= self.longest

    def blocks(self, block: int, tokens: int) -> DocumentBounds:
        """Bounds of the blocks of `block` tokens into which each document of `tokens` tokens in all is cut: every
        document has at most one incomplete block."""
        return DocumentBounds(min(self.documents + tokens // block, tokens), min(self.longest, block))


class PackedDocuments(NamedTuple):
    """The documents of B sequences of T tokens; `find_documents` fills in `offsets` and `sizes`."""

    ids: Tensor | None
    """[B, T] integers, non-decreasing along T; None if each sequence is one document."""
    offsets: Tensor | None = None
    """int32 [N + 1]: start of each document among the B T tokens of the batch, then B T. N is the bound on the number
    of documents, padded to a power of 4, so that a compiled block is compiled for few sizes."""
    sizes: Tensor | None = None
    """int64 [2] on the CPU: `DocumentBounds`."""


UNPACKED = PackedDocuments(None)
"""Each sequence is one document."""


_ON_HOST = WeakTensorKeyDictionary()
"""Document ids on a device -> the same ids on the CPU, while the former live."""
_BOUNDS = WeakTensorKeyDictionary()
"""Document ids -> their declared bounds, None for one document in each sequence, while they live."""


def keep_on_host(ids: Tensor, host: Tensor) -> None:
    """Declares that `ids` on a device, which nothing writes from here on, equal `host`: `document_bounds` reads that,
    if it is on the CPU."""
    if host.device.type == "cpu" and host is not ids:
        _ON_HOST[ids] = host


def declare_bounds(ids: Tensor, bounds: DocumentBounds | None) -> None:
    """Sets the bounds of documents, None where each sequence is one: `find_documents` of these ids then reads no value
    on the host."""
    _BOUNDS[ids] = bounds


def document_bounds(ids: Tensor) -> DocumentBounds | None:
    """The number of documents of ids [B, T] and the tokens of the longest, or their declared bounds; None if each
    sequence is one document. Without `keep_on_host` it waits for all work of the device."""
    if ids in _BOUNDS:
        declared: DocumentBounds | None = _BOUNDS[ids]
        return declared
    starts = _starts(_ON_HOST[ids] if ids in _ON_HOST else ids.cpu()).nonzero()[:, 0]
    if len(starts) == len(ids):
        return None
    ends = functional.pad(starts[1:], (0, 1), value=ids.numel())
    return DocumentBounds(len(starts), int((ends - starts).max()))


def find_documents(ids: Tensor, bounds: DocumentBounds | None = None) -> PackedDocuments:
    """Documents of ids [B, T] within bounds, by default `document_bounds`: call it once per batch. The offsets are
    computed on the device, from the ids of the moment in which they are read: a CUDA graph may contain this call."""
    bounds = document_bounds(ids) if bounds is None else bounds
    if bounds is None:
        return UNPACKED
    size = 1
    while size < bounds.documents:
        size *= 4
    numbers = _starts(ids).cumsum(0, dtype=torch.int32)  # [B T] of each token's document, from 1
    documents = torch.arange(1, size + 2, dtype=torch.int32, device=ids.device)
    return PackedDocuments(ids, torch.searchsorted(numbers, documents, out_int32=True), torch.tensor(bounds))


def _starts(ids: Tensor) -> Tensor:
    """[B T] bool, True at the first token of each document."""
    return functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True).flatten()
