"""Dataset of packed sequences: whole ones per sample, by first fit or best fit in windows of constant size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from megalin._index import count_rows, pack_window
from megalin.data.batch import Batch
from megalin.data.config import DataConfig, SplitName
from megalin.data.datasets.token import open_parts, too_short
from megalin.data.shards.indexed_dataset import Shard
from megalin.errors import DataError
from megalin.parallel.cross_entropy import IGNORED_LABEL

_WINDOW = 1024
"""Sequences that are packed together. More leave less padding, but cost more to pack: 1024 documents of a web
corpus leave 0.2 % of samples of 2048 empty and take 50 microseconds."""

_KEPT_PIECES = 1 << 22
"""Pieces of packed windows that are kept, 16 bytes each: of 4 million documents that fit a sample."""


class _Window(NamedTuple):
    """A packed window."""

    pieces: npt.NDArray[np.int64]  # [n, 2] first id in the shard, tokens; sample by sample
    first_pieces: npt.NDArray[np.int64]  # [samples + 1] first piece of each sample


class _Windows:
    """Cache of packed windows of bounded size, the least recently used are dropped. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], _Window] = OrderedDict()
        self._num_pieces = 0
        self._lock = Lock()

    def get(self, key: tuple[int, int]) -> _Window | None:
        """The window of this (part, window), if it is kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def add(self, key: tuple[int, int], window: _Window) -> None:
        """Keeps a window, in place of others where there is no room."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = window
                self._num_pieces += len(window.pieces)
            while self._num_pieces > _KEPT_PIECES:
                _, dropped = self._kept.popitem(last=False)
                self._num_pieces -= len(dropped.pieces)


class _Read(NamedTuple):
    """Tokens of some samples, one after the other, without padding."""

    tokens: npt.NDArray[np.int64]  # [n]
    labels: npt.NDArray[np.int64]  # [n]
    documents: npt.NDArray[np.int64]  # [n] number of the piece in its sample
    lengths: npt.NDArray[np.int64]  # [samples] tokens of each
    counts: npt.NDArray[np.int64]  # [samples] pieces of each


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
    is token 0 without a label, a document of its own. A sample is a function of its number: its window is packed when
    it is read, and kept. Memory: 8 bytes a window, and at most 64 MiB of packed ones. Thread-safe once open.

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
        self._windows = _Windows()
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

    def batch(self, samples: npt.NDArray[np.int64]) -> Batch:
        """Batch of the samples [B].

        Raises:
            DataError: an id of `vocab_size` or more (file, sequence, offset), or a file that fails or shrank.
        """
        assert samples.min() >= 0 <= samples.max() < self.num_samples, (samples, self.num_samples)
        shape = (len(samples), self.sequence_length)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        documents = np.zeros(shape, np.int32)
        numbers = np.searchsorted(self._first_samples, samples, side="right") - 1
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            pieces = [self._pieces(number, sample) for sample in samples[rows].tolist()]
            read = self._read(number, pieces)
            inside = np.zeros(shape, np.bool_)
            inside[rows] = np.arange(self.sequence_length) < read.lengths[:, None]
            tokens[inside], labels[inside], documents[inside] = read.tokens, read.labels, read.documents
            documents[rows] = np.where(inside[rows], documents[rows], read.counts[:, None])
        return Batch(*(torch.from_numpy(field) for field in (tokens, labels, documents, samples.copy())))

    def _pieces(self, number: int, sample: int) -> npt.NDArray[np.int64]:
        """[n, 2] pieces of a sample of part `number`: position of the first id in the shard, and number of tokens."""
        part = self._parts[number]
        window = int(np.searchsorted(part.first_samples, sample, side="right")) - 1
        packed = self._windows.get((number, window))
        if packed is None:
            packed = self._pack(part, window)
            self._windows.add((number, window), packed)
        row = sample - int(part.first_samples[window])
        return packed.pieces[packed.first_pieces[row] : packed.first_pieces[row + 1]]

    def _pack(self, part: _Part, window: int) -> _Window:
        first = part.first_sequence + window * _WINDOW
        own = slice(first, min(first + _WINDOW, part.end_sequence))
        pieces, first_pieces = pack_window(part.shard.lengths[own], capacity=self.sequence_length, fit=self._fit)
        sequences, offsets, sizes = pieces.T
        starts = part.shard.pointers[own][sequences] // part.shard.dtype.itemsize
        return _Window(np.stack([starts + offsets, sizes.astype(np.int64)], axis=1), first_pieces)

    def _read(self, number: int, samples: Sequence[npt.NDArray[np.int64]]) -> _Read:
        """The tokens of samples of part `number`, given as their pieces."""
        counts = np.array([len(pieces) for pieces in samples])
        positions, sizes = np.concatenate(samples).T
        shard = self._parts[number].shard
        read, is_label = shard.read_ranges(positions, sizes + 1, vocab_size=self._vocab_size)
        ids = read.astype(np.int64)
        last_ids = np.cumsum(sizes + 1) - 1  # labels only; a piece's first id is a token only
        is_token, is_target = np.ones(len(ids), np.bool_), np.ones(len(ids), np.bool_)
        is_token[last_ids] = False
        is_target[last_ids - sizes] = False
        first_pieces = np.cumsum(counts) - counts
        documents = np.arange(len(sizes)) - np.repeat(first_pieces, counts)
        return _Read(
            ids[is_token],
            np.where(is_label, ids, IGNORED_LABEL)[is_target],
            np.repeat(documents, sizes),
            np.add.reduceat(sizes, first_pieces),
            counts,
        )

    @property
    def shards(self) -> list[Shard]:
        """The open shards."""
        return [part.shard for part in self._parts]

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
