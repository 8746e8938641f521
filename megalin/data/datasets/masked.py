"""Dataset of sentence pairs with masked tokens for encoders, from the same shards as for decoders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from megalin.data.batch import EncoderBatch
from megalin.data.config import FRAME_TOKENS, DataConfig, MaskingConfig, SplitName
from megalin.data.datasets.documents import find_documents
from megalin.data.datasets.token import open_parts, refuse_label_masks
from megalin.data.masking import Draws, MaskedSample, Vocabulary, mask, resolve_tokens
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.tokenizers.tokenizer import tokenizer_of
from megalin.errors import DataError

_log = logging.getLogger(__name__)
_LEAST_TOKENS = 2  # one for each segment


class MaskedDataset:
    """Samples of one split. A document of n tokens is cut into ceil(n / (T - 3)) pieces of equal length (to a token),
    and each piece gives `copies` samples: sample i is piece i // copies, cut and masked as a function of (seed, i).

    A piece is cut at a random token into segments A and B; in a fraction of the samples B is replaced by a run of as
    many tokens of another document, or by all of it where that is shorter. Documents of fewer than two tokens are
    skipped. Memory: 28 bytes a document. Thread-safe once open.

    Attributes:
        sequence_length: T.
        num_tokens: tokens of the documents in use.
        num_skipped: documents of fewer than two tokens.
        num_samples: pieces times copies.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Shard, int, int]],
        config: MaskingConfig,
        vocabulary: Vocabulary,
        *,
        split: SplitName,
        sequence_length: int,
        vocab_size: int,
        seed: int,
    ) -> None:
        """Takes the documents of sequences [first, end) of each (shard, first, end); usually called by `open`."""
        self.sequence_length = sequence_length
        self._config, self._vocabulary = config, vocabulary
        self._split, self._vocab_size, self._seed = split, vocab_size, seed
        self._copies = config.copies if split == "train" else 1
        self._documents = documents = find_documents(parts, least_tokens=_LEAST_TOKENS)
        self.num_skipped = documents.skipped
        self.num_tokens = int(documents.length.sum())
        pieces = -(-documents.length // (sequence_length - FRAME_TOKENS))
        self._first_pieces = np.concatenate(([0], np.cumsum(pieces)))  # [documents + 1]
        self.num_samples = int(self._first_pieces[-1]) * self._copies

    @classmethod
    def open(
        cls, config: DataConfig, split: SplitName, vocab_size: int, seed: int, paths: Sequence[str] | None = None
    ) -> Self:
        """Opens and checks the shards of `split` for a model of `vocab_size` ids; warns of skipped documents.

        `paths`: only these of the split's shards.

        Raises:
            ConfigError: special tokens missing in the tokenizer or beyond the vocabulary.
            DataError: a bad shard, one with a label mask, no document of two tokens, or only one where segment B needs
                another.
        """
        masking = config.masking
        assert masking is not None
        paths = config.paths(split) if paths is None else paths
        tokenizer = tokenizer_of(config)
        with ExitStack() as stack:
            parts = open_parts(config, split, vocab_size, paths, stack)
            refuse_label_masks(parts, "data.masking")
            vocabulary = resolve_tokens(masking, tokenizer, vocab_size)
            dataset = cls(
                parts,
                masking,
                vocabulary,
                split=split,
                sequence_length=config.sequence_length,
                vocab_size=vocab_size,
                seed=seed,
            )
            _check_documents(config, split, paths, dataset)
            stack.pop_all()
        if dataset.num_skipped:
            _log.warning(
                "%s: %d documents of the %s split have fewer than %d tokens and are skipped",
                ", ".join(paths),
                dataset.num_skipped,
                split,
                _LEAST_TOKENS,
            )
        return dataset

    @property
    def num_documents(self) -> int:
        """Documents in use."""
        return len(self._documents.length)

    def sample(self, sample: int) -> tuple[MaskedSample, int]:
        """Returns the masked sample and its next-sentence label: 0 if B follows A, 1 if it is of another document.

        Raises:
            DataError: an id of `vocab_size` or more (file, sequence, offset), or a file that fails or shrank.
        """
        assert 0 <= sample < self.num_samples, (sample, self.num_samples)
        draws = Draws(self._seed, self._split, sample)
        piece = sample // self._copies
        document = int(np.searchsorted(self._first_pieces, piece, side="right")) - 1
        first, end = (int(number) for number in self._first_pieces[document : document + 2])
        length = int(self._documents.length[document])
        begin, stop = ((piece - first + step) * length // (end - first) for step in (0, 1))
        text = self._read(document, begin, stop - begin)
        cut = 1 + draws.below("cut", len(text) - 1)
        other = bool(draws.uniform("other document", 1)[0] < self._config.other_document_share)
        second = self._other_text(document, len(text) - cut, draws) if other else text[cut:]
        masked = mask(text[:cut], second, self._config, self._vocabulary, draws, length=self.sequence_length)
        return masked, int(other)

    def _other_text(self, document: int, count: int, draws: Draws) -> npt.NDArray[np.int64]:
        """At most `count` consecutive tokens of a document other than `document`."""
        other = draws.below("which document", self.num_documents - 1)
        other += other >= document
        room = max(0, int(self._documents.length[other]) - count)
        begin = draws.below("where", room + 1)
        return self._read(other, begin, min(count, int(self._documents.length[other])))

    def _read(self, document: int, begin: int, count: int) -> npt.NDArray[np.int64]:
        shard = self._documents.shards[self._documents.shard[document]]
        position = int(self._documents.first_token[document]) + begin
        return shard.read_checked(position, count, vocab_size=self._vocab_size).astype(np.int64)

    def batch(self, samples: npt.NDArray[np.int64]) -> EncoderBatch:
        """Batch of the samples [B]. Raises DataError as `sample` does."""
        masked, labels = zip(*(self.sample(int(number)) for number in samples), strict=True)
        fields = [torch.from_numpy(np.stack(field)) for field in zip(*masked, strict=True)]
        return EncoderBatch(*[*fields, torch.tensor(labels), torch.from_numpy(samples.copy())])

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


def _check_documents(config: DataConfig, split: SplitName, paths: Sequence[str], dataset: MaskedDataset) -> None:
    names, held_out = ", ".join(paths), config.held_out()
    if not dataset.num_documents:
        raise DataError(
            f"{names}: empty corpus: the {split} split{held_out} has no document of at least {_LEAST_TOKENS} tokens "
            f"({dataset.num_skipped} are shorter); give shards with text"
        )
    assert config.masking is not None
    if dataset.num_documents == 1 and config.masking.other_document_share:
        raise DataError(
            f"{names}: data.masking.other_document_share = {config.masking.other_document_share} needs two "
            f"documents, but the {split} split{held_out} has one; give more documents, or set it to 0"
        )
