"""Dataset of documents with a class, for encoders that classify sequences, from the same shards as for decoders."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch

from megalin.data.batch import EncoderBatch
from megalin.data.config import ClassificationConfig, DataConfig, SplitName
from megalin.data.datasets.documents import SplitDocuments, find_documents
from megalin.data.datasets.token import open_parts, too_short
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.shards.label_mask import label_mask_path
from megalin.errors import DataError


class ClassifiedSample(NamedTuple):
    """A document without its class."""

    tokens: npt.NDArray[np.int64]
    """[n] ids, n <= T."""
    label: int
    """The class, from 0."""


class ClassifiedDataset:
    """Samples of one split: sample i is document i, and its last token, which the label mask marks alone, the class:

        tokens = ids[: -1 - separator_tokens],    class = ids[-1] - first_class_id

    The rest of T tokens is padding: token 0, not valid. Memory: 20 bytes a document. Thread-safe once open.

    Attributes:
        sequence_length: T.
        num_tokens: of the split, classes and separators included.
        num_samples: documents.
    """

    def __init__(
        self, documents: SplitDocuments, config: ClassificationConfig, *, sequence_length: int, vocab_size: int
    ) -> None:
        """Takes documents whose lengths fit; usually called by `open`."""
        self.sequence_length, self._vocab_size = sequence_length, vocab_size
        self._config, self._documents = config, documents
        self.num_samples = len(documents.length)
        self.num_tokens = int(documents.length.sum())

    @classmethod
    def open(cls, config: DataConfig, split: SplitName, vocab_size: int, paths: Sequence[str] | None = None) -> Self:
        """Opens and checks the shards of `split` for a model of `vocab_size` ids; `paths`: only these of them.

        Raises:
            DataError: a bad shard, one without a label mask, no document, or documents that are too short or too long.
        """
        assert config.classification is not None
        paths = config.paths(split) if paths is None else paths
        with ExitStack() as stack:
            parts = open_parts(config, split, vocab_size, paths, stack)
            for shard, _, _ in parts:
                if shard.label_mask is None:
                    raise DataError(
                        f"{label_mask_path(shard.prefix)}: missing, but data.classification reads the class of a "
                        "document from the token that the label mask marks; write the shard again with a mask"
                    )
            documents = find_documents(parts, least_tokens=1)
            if not len(documents.length):
                raise too_short(config, split, paths, num_tokens=0)
            _check_lengths(documents, config.classification, config.sequence_length)
            dataset = cls(
                documents, config.classification, sequence_length=config.sequence_length, vocab_size=vocab_size
            )
            stack.pop_all()
        return dataset

    def sample(self, sample: int) -> ClassifiedSample:
        """Returns the tokens and the class of document `sample`.

        Raises:
            DataError: an id of `vocab_size` or more, a mask that does not mark the last token alone, a last token that
                is no class (each with file and token), or a file that fails or shrank.
        """
        assert 0 <= sample < self.num_samples, (sample, self.num_samples)
        config, documents = self._config, self._documents
        shard, position = documents.shards[documents.shard[sample]], int(documents.first_token[sample])
        length = int(documents.length[sample])
        ids = shard.read_checked(position, length, vocab_size=self._vocab_size).astype(np.int64)
        marked = position + np.flatnonzero(shard.read_label_mask(position, length))
        last = position + length - 1
        if marked.tolist() != [last]:
            raise DataError(
                f"{label_mask_path(shard.prefix)}: marks {len(marked)} of the tokens {position} to {last}, a document "
                f"whose class is token {last}; data.classification needs masks that mark the last token of each "
                "document, and no other"
            )
        label, last_class = int(ids[-1]) - config.first_class_id, config.first_class_id + config.num_classes - 1
        if not 0 <= label < config.num_classes:
            raise DataError(
                f"{shard.prefix}: token {last} is {int(ids[-1])}, but the classes of data.classification have the ids "
                f"{config.first_class_id} to {last_class}; correct first_class_id and num_classes, or the shard"
            )
        return ClassifiedSample(ids[: -1 - config.separator_tokens], label)

    def batch(self, samples: npt.NDArray[np.int64]) -> EncoderBatch:
        """Batch of the samples [B]. Raises DataError as `sample` does."""
        shape = (len(samples), self.sequence_length)
        tokens, valid, labels = np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.empty(len(samples), np.int64)
        for row, number in enumerate(samples.tolist()):
            ids, labels[row] = self.sample(number)
            tokens[row, : len(ids)], valid[row, : len(ids)] = ids, True
        none = torch.zeros(len(samples), 0, dtype=torch.int64)
        return EncoderBatch(
            tokens=torch.from_numpy(tokens),
            token_types=torch.zeros(shape, dtype=torch.int64),
            valid=torch.from_numpy(valid),
            masked_positions=none,
            masked_labels=none,
            sequence_labels=torch.from_numpy(labels),
            sample_ids=torch.from_numpy(samples.copy()),
        )

    @property
    def shards(self) -> list[Shard]:
        """The open shards."""
        return self._documents.shards

    def close(self) -> None:
        """Closes the shards."""
        for shard in self._documents.shards:
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_lengths(documents: SplitDocuments, config: ClassificationConfig, sequence_length: int) -> None:
    """Raises DataError for the first document without a token besides its class, and for the longest one above T."""
    extra = 1 + config.separator_tokens
    least = f"a class and data.classification.separator_tokens = {config.separator_tokens}"
    if documents.skipped:
        names = ", ".join(str(shard.prefix) for shard in documents.shards)
        raise DataError(f"{names}: {documents.skipped} documents have no token, not even a class; remove them")
    shortest, longest = int(documents.length.argmin()), int(documents.length.argmax())
    if documents.length[shortest] <= extra:
        _refuse(documents, shortest, f"at least one token besides {least}; give it more, or remove it")
    if documents.length[longest] > sequence_length + extra:
        needed = int(documents.length[longest]) - extra
        rule = f"at most data.sequence_length = {sequence_length} besides {least}; use sequence_length = {needed}"
        _refuse(documents, longest, f"{rule}, or shorter documents")


def _refuse(documents: SplitDocuments, number: int, rule: str) -> NoReturn:
    shard, first = documents.shards[documents.shard[number]], int(documents.first_token[number])
    raise DataError(
        f"{shard.prefix}: the document at token {first} has {documents.length[number]} tokens, but needs {rule}"
    )
