"""Dataset of consecutive tokens: the shards of a split concatenated and cut into samples of T + 1 ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megalin._index import build_sample_index
from megalin.data.batch import Batch, pack
from megalin.data.config import DataConfig, SplitName
from megalin.data.shards.indexed_dataset import Shard, manifest_path
from megalin.data.shards.manifest import read_manifest
from megalin.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalin.errors import DataError

_log = logging.getLogger(__name__)
_PIECE_BLOCK = 1024  # sequence starts that are searched together


class _Segment(NamedTuple):
    """Sequences [first_sequence, end_sequence) of a shard, and the samples that start there."""

    shard: Shard
    first_sequence: int
    end_sequence: int
    first_token: int  # of the shard
    end_token: int
    first_sample: int
    sequences: npt.NDArray[np.int32]  # [samples] sequence of each start, from first_sequence
    offsets: npt.NDArray[np.int32]  # [samples] token of that sequence


class Window(NamedTuple):
    """Ids of one sample."""

    ids: npt.NDArray[np.int64]
    """[T + 1]."""
    pieces: npt.NDArray[np.int32]
    """[T + 1] the sequence of each id, from 0 and never falling."""
    label_mask: npt.NDArray[np.bool_]
    """[T + 1] True for the ids that count as labels."""


class TokenDataset:
    """Samples of one split: sample i is tokens [iT, iT + T] of its concatenated shards; the tail is dropped.

    Memory: 8 bytes a sample for its start, and one window while it is read. Thread-safe once open.

    Attributes:
        sequence_length: T.
        num_tokens: tokens of the split, the dropped tail included.
        num_samples: (num_tokens - 1) // T.
    """

    def __init__(
        self, parts: Sequence[tuple[Shard, int, int]], *, sequence_length: int, vocab_size: int, isolate_documents: bool
    ) -> None:
        """Concatenates sequences [first, end) of each (shard, first, end); usually called by `open`."""
        self.sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._isolate_documents = isolate_documents
        sizes = [shard.first_token(end) - shard.first_token(first) for shard, first, end in parts]
        self.num_tokens = sum(sizes)
        self.num_samples = max(0, self.num_tokens - 1) // sequence_length
        self._segments = []
        position = 0
        for (shard, first, end), size in zip(parts, sizes, strict=True):
            first_sample = min(-(-position // sequence_length), self.num_samples)
            end_sample = min(-(-(position + size) // sequence_length), self.num_samples)
            sequences, offsets = build_sample_index(
                shard.lengths[first:end],
                first_token=first_sample * sequence_length - position if end_sample > first_sample else 0,
                stride=sequence_length,
                count=end_sample - first_sample,
            )
            start = shard.first_token(first)
            self._segments.append(_Segment(shard, first, end, start, start + size, first_sample, sequences, offsets))
            position += size
        self._first_samples = np.array([segment.first_sample for segment in self._segments])

    @classmethod
    def open(cls, config: DataConfig, split: SplitName, vocab_size: int, paths: Sequence[str] | None = None) -> Self:
        """Opens and checks the shards of `split` for a model of `vocab_size` ids; `paths`: only these of them.

        Raises:
            DataError: a bad shard; no token or label; fewer than T + 1 tokens; a tokenizer with more ids than the
                model, or not the one that made a shard.
        """
        paths = config.paths(split) if paths is None else paths
        with ExitStack() as stack:
            parts = open_parts(config, split, vocab_size, paths, stack)
            dataset = cls(
                parts,
                sequence_length=config.sequence_length,
                vocab_size=vocab_size,
                isolate_documents=config.isolate_documents,
            )
            if not dataset.num_samples:
                raise too_short(config, split, paths, num_tokens=dataset.num_tokens)
            stack.pop_all()
        return dataset

    def window(self, sample: int) -> Window:
        """Reads the window of `sample`.

        Raises:
            DataError: an id of `vocab_size` or more (file, sequence, offset), or a file that fails or shrank.
        """
        assert 0 <= sample < self.num_samples, (sample, self.num_samples)
        number = int(np.searchsorted(self._first_samples, sample, side="right")) - 1
        segment = self._segments[number]
        place = sample - segment.first_sample
        sequence = segment.first_sequence + int(segment.sequences[place])
        position = segment.shard.first_token(sequence) + int(segment.offsets[place])
        ids = np.empty(self.sequence_length + 1, np.int64)
        starts = np.zeros(self.sequence_length + 1, np.int32)
        label_mask = np.empty(self.sequence_length + 1, np.bool_)
        filled = 0
        while True:
            count = min(len(ids) - filled, segment.end_token - position)
            ids[filled : filled + count] = segment.shard.read_checked(position, count, vocab_size=self._vocab_size)
            label_mask[filled : filled + count] = segment.shard.read_label_mask(position, count)
            for begin in _piece_starts(segment, sequence, position, position + count):
                starts[filled + begin - position] = 1
            filled += count
            if filled == len(ids):
                return Window(ids, np.cumsum(starts, dtype=np.int32), label_mask)
            number += 1
            segment = self._segments[number]
            sequence, position = segment.first_sequence, segment.first_token
            starts[filled] = 1

    def batch(self, samples: npt.NDArray[np.int64]) -> Batch:
        """Batch of the samples [B]. Raises DataError as `window` does."""
        windows = [self.window(int(sample)) for sample in samples]
        ids, pieces, label_masks = (np.stack(field) for field in zip(*windows, strict=True))
        return pack(ids, pieces, samples.copy(), isolate_documents=self._isolate_documents, label_masks=label_masks)

    @property
    def shards(self) -> list[Shard]:
        """The open shards."""
        return [segment.shard for segment in self._segments]

    def close(self) -> None:
        """Closes the shards."""
        for segment in self._segments:
            segment.shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _piece_starts(segment: _Segment, sequence: int, position: int, end: int) -> Iterator[int]:
    """Tokens in (position, end) of the shard that start a sequence after `sequence`."""
    itemsize = segment.shard.dtype.itemsize
    for first in range(sequence + 1, segment.end_sequence, _PIECE_BLOCK):
        block = segment.shard.pointers[first : min(first + _PIECE_BLOCK, segment.end_sequence)] // itemsize
        inside = block[(block > position) & (block < end)]
        yield from inside.tolist()
        if block[-1] >= end:
            return


def open_parts(
    config: DataConfig, split: SplitName, vocab_size: int, paths: Sequence[str], stack: ExitStack
) -> list[tuple[Shard, int, int]]:
    """Opens and checks the shards `paths`, each with its sequences [first, end) of `split`; `stack` closes them.

    Raises:
        DataError: a bad shard; label masks without a label; a tokenizer with more ids than the model, or not the one
            that made a shard.
    """
    tokenizer = check_tokenizer(config, vocab_size)
    parts = []
    for prefix in paths:
        shard = stack.enter_context(Shard(prefix, vocab_size=vocab_size))
        _check_manifest(shard, config, tokenizer)
        if not shard.num_tokens:
            _log.warning("%s: a shard without tokens; skipped", prefix)
            shard.close()
            continue
        parts.append((shard, *config.sequences(split, shard.num_sequences)))
    _check_labels(config, split, parts)
    return parts


def _check_labels(config: DataConfig, split: SplitName, parts: Sequence[tuple[Shard, int, int]]) -> None:
    """Raises DataError where the split has tokens, but its masks leave it without a label."""
    masks = []
    for shard, first, end in parts:
        start, stop = shard.first_token(first), shard.first_token(end)
        if start < stop:
            if shard.label_mask is None or shard.label_mask.any(start, stop):
                return
            masks.append(str(shard.label_mask.path))
    if masks:
        raise DataError(
            f"{', '.join(masks)}: no token of the {split} split{config.held_out()} counts as a label; write masks with "
            "the tokens to predict, or remove them and the manifests of their shards so that every token counts"
        )


def refuse_label_masks(parts: Sequence[tuple[Shard, int, int]], setting: str) -> None:
    """Raises DataError where a shard has a label mask, which `setting` of the config does not support."""
    for shard, _, _ in parts:
        if shard.label_mask is not None:
            raise DataError(
                f"{shard.label_mask.path}: {setting} does not support label masks; use next-token samples in "
                'data.order = "megalin", or remove the mask and the manifest of the shard so that every token counts'
            )


def too_short(config: DataConfig, split: SplitName, paths: Sequence[str], *, num_tokens: int) -> DataError:
    """Error for a split of `num_tokens` without a sample of T + 1 ids."""
    names = ", ".join(paths)
    if not num_tokens:
        return DataError(
            f"{names}: empty corpus: the {split} split{config.held_out()} has no tokens; give shards with text"
        )
    return DataError(
        f"{names}: data.sequence_length = {config.sequence_length} needs {config.sequence_length + 1} tokens, but the "
        f"{split} split{config.held_out()} has {num_tokens}; lower sequence_length to at most {num_tokens - 1} or add "
        "data"
    )


def check_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer | None:
    """The run's tokenizer; None without one. Raises DataError if it has more ids than the model."""
    if config.tokenizer is None:
        return None
    tokenizer = load_tokenizer(config.tokenizer, config.eod_token)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{config.tokenizer}: has {tokenizer.vocab_size} token ids, but the model's vocab_size is {vocab_size}; "
            f"raise vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _check_manifest(shard: Shard, config: DataConfig, tokenizer: Tokenizer | None) -> None:
    """Compares the tokenizer and label mask of the shard's manifest, if there is one, with the run's and its own; warns
    of documents that end with another id.

    Raises:
        DataError: the tokenizers differ, or `data.special_tokens` and the special tokens of the shard; or one of shard
            and manifest has a label mask, and the other not.
    """
    manifest = read_manifest(shard)
    if shard.label_mask is not None and manifest is not None and manifest.digests is not None and not manifest.has_mask:
        raise DataError(
            f"{shard.label_mask.path}: by {manifest_path(shard.prefix)} the shard was written without a label mask; "
            f"remove it, or, if it was added on purpose, store its digest: megalin data inspect {shard.prefix} --digest"
        )
    made_by = None if manifest is None else manifest.tokenizer
    if made_by is None or manifest is None:
        return
    if tokenizer is not None and made_by.digest != tokenizer.digest:
        raise DataError(
            f"{shard.prefix}: made by the tokenizer with sha256 {made_by.digest}, but data.tokenizer = "
            f"{config.tokenizer} has {tokenizer.digest}; use the one that made the shard"
        )
    end = made_by.entry.get("eod_id") if manifest.entries.get("append_eod") else None
    if tokenizer is not None and end is not None and end != tokenizer.eod_id:
        _log.warning(
            "%s: its documents end with the id %s, but texts of this run with %d, so generation would not stop at the "
            "end of a document; set data.eod_token = %s",
            *(shard.prefix, end, tokenizer.eod_id, end),
        )
    made_with = made_by.entry.get("special_tokens")
    if None not in (made_with, config.special_tokens) and made_with != config.special_tokens:
        raise DataError(
            f"{shard.prefix}: made {'with' if made_with else 'without'} --special-tokens, but data.special_tokens = "
            f"{config.special_tokens}; set it to {made_with}, or write the shard again"
        )
