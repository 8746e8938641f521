"""Documents and padding of a batch, as mixers read them: each collective and each read by the host once a batch."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from megalin.ops.attention.local import block_ids
from megalin.ops.documents import UNPACKED, PackedDocuments, document_bounds, find_documents
from megalin.ops.scans.transition import ShardDocuments
from megalin.parallel.context_parallel import ContextParallel, FullSequenceInfo


class DocumentView(NamedTuple):
    """The part of `SequenceDocuments` that one mixer reads in its forward: tensors, so that its block compiles."""

    ids: Tensor | None = None
    """[B, T/cp] of this rank's tokens, non-decreasing; None where each sequence is one document."""
    valid: Tensor | None = None
    """[B, T/cp] bool, False where a token is padding; None where all tokens count. Causal mixers, whose padding comes
    last and without labels, do not read it."""
    shard: ShardDocuments | None = None
    """Documents at the ends of the ranks' shards; None where this rank has the full sequence, or unread."""
    full_sequence: FullSequenceInfo = FullSequenceInfo(None, None)
    """Documents and padding of all ranks' tokens, [B, T]."""
    packed: PackedDocuments = UNPACKED
    """Offsets of the documents that attention reads, of all ranks' tokens or of those visible through a window."""


class SequenceDocuments:
    """The documents of a batch, from which each mixer takes its view (`Mixer.document_view`) outside of its block.

    Every property is computed at its first use and kept. Those of other ranks' tokens are collectives over the
    context-parallel axis: its ranks read the same ones in the same order, because they run the same mixers.
    """

    def __init__(
        self, cp: ContextParallel, tokens: Tensor, ids: Tensor | None = None, valid: Tensor | None = None
    ) -> None:
        """
        Args:
            cp: the axis over which sequences are sharded.
            tokens: [B, T/cp], read for its shape and device alone.
            ids: [B, T/cp] of this rank's tokens, non-decreasing along T; None where each sequence is one document.
            valid: [B, T/cp] bool, False at padding; None where all tokens count.
        """
        self._cp, self._tokens, self.ids, self.valid = cp, tokens, ids, valid
        self._windows: dict[tuple[int, bool], PackedDocuments] = {}
        self._blocks: dict[tuple[int, bool], PackedDocuments] = {}

    @cached_property
    def shard(self) -> ShardDocuments | None:
        """Documents at the ends of the ranks' shards; None without context parallelism. An all-gather of 2 ids a
        sequence."""
        return self._cp.shard_documents(self._tokens, self.ids)

    @cached_property
    def full_sequence(self) -> FullSequenceInfo:
        """Documents and padding of all ranks' tokens. With context parallelism an all-gather of a few bytes a token."""
        if self._cp.size == 1:
            return FullSequenceInfo(self.ids, self.valid)
        return self._cp.full_sequence_info(self.ids, self.valid)

    @cached_property
    def packed(self) -> PackedDocuments:
        """Offsets of the documents in the full sequences. With context parallelism the host waits for the device, which
        alone has all ids."""
        ids = self.full_sequence.document_ids
        return UNPACKED if ids is None else find_documents(ids)

    @property
    def unread(self) -> PackedDocuments:
        """Documents of the full sequences without offsets, for which the host does not wait."""
        return PackedDocuments(self.full_sequence.document_ids)

    def in_window(self, window: int, *, offsets: bool = True) -> PackedDocuments:
        """Documents of the tokens that this rank's queries attend to in a window of `window` tokens.

        As `packed`, or `unread` without offsets, where this rank has the full sequence; else an all-gather of
        window - 1 ids.
        """
        if self._cp.size == 1:
            return self.packed if offsets else self.unread
        if self.ids is None:
            return UNPACKED
        if (key := (window, offsets)) not in self._windows:
            ids = self._cp.visible_document_ids(self.ids, window=window)
            self._windows[key] = find_documents(ids) if offsets else PackedDocuments(ids)
        return self._windows[key]

    def in_blocks(self, block: int, *, offsets: bool = True) -> PackedDocuments:
        """Blocks of `block` tokens of each document of the full sequences, as documents; UNPACKED where each
        sequence is one document. The host reads the documents alone, as for `packed`, and nothing without offsets."""
        ids = self.full_sequence.document_ids
        if ids is None:
            return UNPACKED
        if (key := (block, offsets)) not in self._blocks:
            self._blocks[key] = self._find_blocks(ids, block) if offsets else PackedDocuments(_blocks(ids, block))
        return self._blocks[key]

    def _find_blocks(self, ids: Tensor, block: int) -> PackedDocuments:
        bounds = document_bounds(ids)
        if bounds is None:
            return UNPACKED
        return find_documents(_blocks(ids, block), bounds.blocks(block, ids.numel()))

    def local_view(self) -> DocumentView:
        """The view of recurrent mixers: this rank's tokens, and the documents at the ends of the ranks' shards."""
        return DocumentView(self.ids, self.valid, self.shard)


def _blocks(ids: Tensor, block: int) -> Tensor:
    """[B, T] block of each token, non-decreasing: document ids [B, T], tokens of a block."""
    return block_ids(ids.shape[1], block=block, document_ids=ids, device=ids.device)
