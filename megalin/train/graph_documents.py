"""Documents of a step's micro-batches, as far as a CUDA graph of their attention depends on them."""

from __future__ import annotations

from collections.abc import Sequence

from megalin.data.batch import AnyBatch, Batch
from megalin.ops.documents import DocumentBounds, declare_bounds, document_bounds


class GraphDocuments:
    """Bounds of the packed documents of all steps so far, and the micro-batches of the last one that are packed.

    A graph's launches depend on both alone: it is valid for a step whose documents are within the bounds. These are
    powers of 2, common to all micro-batches, and only grow, so a run has few of them.
    """

    def __init__(self) -> None:
        self._packed: tuple[bool, ...] | None = None
        self._bounds = DocumentBounds(1, 1)

    def admit(self, batches: Sequence[AnyBatch]) -> bool:
        """Declares the bounds of a step's documents, grown to hold them; returns whether they are those of the step
        before. Without `keep_on_host` the host waits for the device."""
        found = [document_bounds(batch.document_ids) if isinstance(batch, Batch) else None for batch in batches]
        packed, before = tuple(each is not None for each in found), (self._packed, self._bounds)
        for each in found:
            if each is not None and not self._bounds.covers(each):
                self._bounds = DocumentBounds(*map(_round_up, map(max, self._bounds, each)))
        self._packed = packed
        self.declare(batches)
        return before == (self._packed, self._bounds)

    def declare(self, batches: Sequence[AnyBatch]) -> None:
        """Declares the bounds of other batches with as many documents as those of the last step."""
        for batch, is_packed in zip(batches, self._packed or (), strict=True):
            if isinstance(batch, Batch):
                declare_bounds(batch.document_ids, self._bounds if is_packed else None)


def _round_up(number: int) -> int:
    """The next power of 2."""
    return 1 << (number - 1).bit_length()
