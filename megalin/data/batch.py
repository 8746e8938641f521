"""Batches: next-token samples out of windows of T + 1 ids, and samples for encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megalin.ops.documents import keep_on_host
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.cross_entropy import IGNORED_LABEL


class Batch(NamedTuple):
    """B samples of T tokens for a language model."""

    tokens: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64, -100 = ignored
    document_ids: torch.Tensor  # [B, T] int32, from 0 in each sample, never falling
    sample_ids: torch.Tensor  # [B] int64, number of the sample in its split; -1 = padding sample
    draw: torch.Tensor | None = None  # [B] int64, number of the sample in the run, if it has one; keys dropout

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of a decoder's forward."""
        fields = {"tokens": self.tokens, "labels": self.labels, "document_ids": self.document_ids, "draw": self.draw}
        return {name: field for name, field in fields.items() if field is not None}

    def label_counts(self) -> torch.Tensor:
        """[1] int64, number of valid labels of each term of the loss."""
        return (self.labels != IGNORED_LABEL).sum().view(1)

    def padding(self) -> tuple[int, ...]:
        """Values of a padding sample, by field."""
        return 0, IGNORED_LABEL, 0, -1, 0


class EncoderBatch(NamedTuple):
    """B sequences of T tokens for an encoder, each with room for P predictions."""

    tokens: torch.Tensor  # [B, T] int64
    token_types: torch.Tensor  # [B, T] int64
    valid: torch.Tensor  # [B, T] bool, False at padding
    masked_positions: torch.Tensor  # [B, P] int64, in the full sequence; P = 0 for a model that classifies
    masked_labels: torch.Tensor  # [B, P] int64, -100 = ignored
    # [B] int64, next sentence (0 follows, 1 of another document) or class; -100 = ignored
    sequence_labels: torch.Tensor
    sample_ids: torch.Tensor  # [B] int64, number of the sample in its split; -1 = padding sample
    draw: torch.Tensor | None = None  # [B] int64, number of the sample in the run, if it has one; keys dropout

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of an encoder's forward."""
        names = ["tokens", "token_types", "valid", "sequence_labels"]
        if self.masked_positions.shape[1]:
            names += ["masked_positions", "masked_labels"]
        if self.draw is not None:
            names.append("draw")
        return {name: getattr(self, name) for name in names}

    def label_counts(self) -> torch.Tensor:
        """[1 or 2] int64, number of valid labels of each term of the loss: masked tokens if any, sequences."""
        labels = [self.masked_labels, self.sequence_labels] if self.masked_labels.shape[1] else [self.sequence_labels]
        return torch.stack([(each != IGNORED_LABEL).sum() for each in labels])

    def padding(self) -> tuple[int, ...]:
        """Values of a padding sample, by field."""
        return 0, 0, 0, 0, IGNORED_LABEL, IGNORED_LABEL, -1, 0


AnyBatch = Batch | EncoderBatch
BatchT = TypeVar("BatchT", bound=AnyBatch)


def pack(
    windows: npt.NDArray[np.int64],
    pieces: npt.NDArray[np.int32],
    sample_ids: npt.NDArray[np.int64],
    *,
    isolate_documents: bool,
    label_masks: npt.NDArray[np.bool_] | None = None,
) -> Batch:
    """Builds a batch; labels are shifted on the full window, before it is sharded: labels[t] = windows[t + 1].

    Args:
        windows: [B, T + 1] int64, token ids.
        pieces: [B, T + 1] int32, the document of each id, from 0 in each window and never falling. It comes from the
            shard's index, so a text that contains the end-of-document token is not cut there.
        sample_ids: [B] int64.
        isolate_documents: ignore the label after a document's last token (the next document's first) and number the
            documents; else the window is one document and its labels count.
        label_masks: [B, T + 1], False for ids that do not count as labels; None: all do.
    """
    assert windows.shape == pieces.shape, (windows.shape, pieces.shape)
    labels = windows[:, 1:].copy()  # [B, T]
    if label_masks is not None:
        assert label_masks.shape == windows.shape, (label_masks.shape, windows.shape)
        labels[~label_masks[:, 1:]] = IGNORED_LABEL
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


def map_fields(function: Callable[..., torch.Tensor], *batches: BatchT) -> BatchT:
    """The batch of function(fields of the batches), field by field in order; `draw` stays absent where it is."""
    columns = zip(*batches, strict=True)
    fields: Iterator[Any] = (None if column[0] is None else function(*column) for column in columns)
    return type(batches[0])(*fields)


def with_draw(batch: BatchT, draw: torch.Tensor) -> BatchT:
    """The batch with its samples' numbers in the run, [B] int64."""
    return type(batch)(**(batch._asdict() | {"draw": draw}))


def pad_samples(batch: BatchT, count: int) -> BatchT:
    """Appends samples without a valid label (token 0, sample -1) until there are `count`."""
    missing = count - len(batch.sample_ids)
    assert missing >= 0, (count, len(batch.sample_ids))

    values = iter(batch.padding())

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), next(values))])

    return map_fields(padded, batch)


def take_samples(batch: BatchT, samples: slice | torch.Tensor) -> BatchT:
    """Some samples of a batch, by a slice or an index."""
    return map_fields(lambda tensor: tensor[samples], batch)


def split_tokens(batch: BatchT, cp: ContextParallel) -> BatchT:
    """This rank's tokens of a batch; the labels were made on full sequences.

    For an encoder, each rank predicts P / cp of the masked tokens, whatever their positions: it has the positions of
    all of them, P rounded up to a multiple of cp, and the labels of its own. Only the first rank has sequence labels.
    """
    if cp.size == 1:
        return batch
    if isinstance(batch, Batch):
        cut = {name: cp.shard(getattr(batch, name)).contiguous() for name in ("tokens", "labels", "document_ids")}
        return type(batch)(**(batch._asdict() | cut))
    cut = {name: cp.shard(getattr(batch, name)).contiguous() for name in ("tokens", "token_types", "valid")}
    missing = (0, -batch.masked_labels.shape[1] % cp.size)
    labels = torch.nn.functional.pad(batch.masked_labels, missing, value=IGNORED_LABEL)
    cut["masked_positions"] = torch.nn.functional.pad(batch.masked_positions, missing)
    cut["masked_labels"] = cp.shard(labels).contiguous()
    if cp.axis.rank > 0:
        cut["sequence_labels"] = torch.full_like(batch.sequence_labels, IGNORED_LABEL)
    return type(batch)(**(batch._asdict() | cut))


def pinned(batch: BatchT) -> BatchT:
    """Copy of the batch in page-locked memory, for asynchronous copies to a GPU by `batch_to`."""
    return map_fields(torch.Tensor.pin_memory, batch)


def batch_to(batch: BatchT, device: torch.device) -> BatchT:
    """Copies the batch to `device`; mixers for which the host reads its documents find these without waiting for it."""
    copied = map_fields(lambda tensor: tensor.to(device, non_blocking=True), batch)
    if isinstance(copied, Batch) and isinstance(batch, Batch):
        keep_on_host(copied.document_ids, batch.document_ids)
    return copied
