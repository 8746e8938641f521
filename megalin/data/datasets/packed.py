"""Dataset of packed sequences: whole ones per sample, by first fit or best fit in windows of constant size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from megalin._index import count_rows, pieces_of_row
from megalin.data.batch import Batch
from megalin.data.config import DataConfig, SplitName
from megalin.data.datasets.token import mask_digests, open_parts, too_short
from megalin.data.shards.indexed_dataset import Shard
from megalin.errors import DataError
from megalin.parallel.cross_entropy import IGNORED_LABEL

_WINDOW = 1024
"""Sequences that are packed together. More leave less padding, but cost more to pack again for each sample: 1024
documents of a web corpus leave 0.2 % of samples of 2048 empty and take 50 microseconds."""


class _Part(NamedTuple):
    """Sequences [first, end) of a shard, and the samples that they fill."""

    shard: Shard
    first_sequence: int
    end_sequence: int
    first_samples: npt.NDArray[np.int64]  # [windows + 1] first sample of each window, in the split


class PackedDataset:
    """Packed samples of one split: T tokens, filled with whole sequences of one window of 1024.

    A sequence of n ids takes n - 1 tokens of a sample, its last id being a label only. One longer than T + 1 is cut
    into pieces that share an id; one of a single id is left out. The largest piece of a window is placed first. Padding
    is token 0 without a label, a document of its own. A sample is a function of its number: its window is packed again
    when it is read. Memory: 8 bytes a window. Thread-safe once open.

    Attributes:
        sequence_length: T.
        num_tokens: of the split.
        num_samples: packed samples.
        num_targets: predicted tokens, those without a label by their mask included; the rest of the samples is padding.
    """

    def __init__(
        self, parts: Sequence[tuple[Shard, int, int]], *, sequence_length: int, vocab_size: int, fit: str
    ) -> None:
        """Packs sequences [first, end) of each (shard, first, end) separately; usually called by `open`."""
        self.sequence_length, self._vocab_size, self._fit = sequence_length, vocab_size, fit
        self._parts = []
        self.num_tokens = self.num_samples = self.num_targets = 0
        for shard, first, end in parts:
            lengths = shard.lengths[first:end]
            counts = count_rows(lengths, capacity=sequence_length, window=_WINDOW, fit=fit)
            first_samples = np.cumsum([self.num_samples, *counts], dtype=np.int64)
            self._parts.append(_Part(shard, first, end, first_samples))
            self.num_samples = int(first_samples[-1])
            tokens = shard.first_token(end) - shard.first_token(first)
            self.num_tokens += tokens
            self.num_targets += tokens - int(np.count_nonzero(lengths))
        self._first_samples = np.array([part.first_samples[0] for part in self._parts])

    @classmethod
    def open(cls, config: DataConfig, split: SplitName, vocab_size: int, paths: Sequence[str] | None = None) -> Self:
        """Opens and checks the shards of `split` for a model of `vocab_size` ids; `paths`: only these of them.

        Raises:
            DataError: as TokenDataset does, but where no sequence has two tokens, not where there are fewer than T + 1.
        """
        paths = config.paths(split) if paths is None else paths
        with ExitStack() as stack:
            parts = open_parts(config, split, vocab_size, paths, stack)
            dataset = cls(parts, sequence_length=config.sequence_length, vocab_size=vocab_size, fit=config.packing)
            if not dataset.num_samples:
                raise _nothing_to_pack(config, split, paths, dataset.num_tokens)
            stack.pop_all()
        return dataset

    @property
    def empty_fraction(self) -> float:
        """Fraction of padding in the samples."""
        return 1 - self.num_targets / (self.num_samples * self.sequence_length)

    def pieces(self, sample: int) -> list[tuple[Shard, int, int]]:
        """Pieces of a sample: the shard, the position of its first id there, and its number of ids."""
        assert 0 <= sample < self.num_samples, (sample, self.num_samples)
        part = self._parts[int(np.searchsorted(self._first_samples, sample, side="right")) - 1]
        window = int(np.searchsorted(part.first_samples, sample, side="right")) - 1
        first = part.first_sequence + window * _WINDOW
        lengths = part.shard.lengths[first : min(first + _WINDOW, part.end_sequence)]
        number = sample - int(part.first_samples[window])
        found = pieces_of_row(lengths, capacity=self.sequence_length, fit=self._fit, row=number)
        return [
            (part.shard, part.shard.first_token(first + sequence) + offset, size + 1)
            for sequence, offset, size in found.tolist()
        ]

    def batch(self, samples: npt.NDArray[np.int64]) -> Batch:
        """Batch of the samples [B].

        Raises:
            DataError: an id of `vocab_size` or more (file, sequence, offset), or a file that fails or shrank.
        """
        shape = (len(samples), self.sequence_length)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        documents = np.zeros(shape, np.int32)
        for row, sample in enumerate(samples.tolist()):
            filled = 0
            for number, (shard, position, count) in enumerate(self.pieces(sample)):
                ids = shard.read_checked(position, count, vocab_size=self._vocab_size)
                end = filled + count - 1
                tokens[row, filled:end], labels[row, filled:end] = ids[:-1], ids[1:]
                labels[row, filled:end][~shard.read_label_mask(position + 1, count - 1)] = IGNORED_LABEL
                documents[row, filled:end] = number
                filled = end
                documents[row, end:] = number + 1
        return Batch(*(torch.from_numpy(field) for field in (tokens, labels, documents, samples.copy())))

    def label_mask_digests(self) -> list[str | None]:
        """sha256 of each shard's label mask, None without one. Raises DataError for a file that fails or shrank."""
        return mask_digests(part.shard for part in self._parts)

    def close(self) -> None:
        """Closes the shards."""
        for part in self._parts:
            part.shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing_to_pack(config: DataConfig, split: SplitName, paths: Sequence[str], num_tokens: int) -> DataError:
    if not num_tokens:
        return too_short(config, split, paths, num_tokens=0)
    return DataError(
        f"{', '.join(paths)}: no sequence of the {split} split{config.held_out()} has two tokens or more "
        f"({num_tokens} in all); give shards with text"
    )
