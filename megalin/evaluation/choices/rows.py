"""Packed rows of requests: each request is one document of a sample of the run's own shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalin._index import pack_window
from megalin.data.batch import Batch
from megalin.parallel.cross_entropy import IGNORED_LABEL

_WINDOW = 1024
"""Requests that are packed together; more leave less padding and take longer to pack."""


class ScoredRequest(Protocol):
    """Ids some of which are answers, whose probabilities count."""

    @property
    def ids(self) -> Sequence[int] | npt.NDArray[np.int32]:
        """[n] at least two."""

    @property
    def num_answer_tokens(self) -> int:
        """Number of labels."""

    def labels(self) -> npt.NDArray[np.int64]:
        """[n - 1] label of each id but the last: the next id where it is part of an answer, else IGNORED_LABEL."""


class RequestRows:
    """Samples of T tokens, each filled with whole requests; the rest is padding, a document of its own.

    A request of n ids takes n - 1 tokens: its last id is a label only. Only tokens that predict the answer have a
    label. Together with its padding a sample has the shape of the run's, so that a compiled model is not compiled
    again, and context, pipeline, tensor and data parallelism work as in training.

    Attributes:
        sequence_length: T.
        num_samples: packed samples.
    """

    def __init__(self, requests: Sequence[ScoredRequest], *, sequence_length: int) -> None:
        """Packs requests of at most T + 1 ids each."""
        self.sequence_length = sequence_length
        self._requests = requests
        lengths = np.array([len(request.ids) for request in requests], np.int32)
        assert lengths.max(initial=0) <= sequence_length + 1, (lengths.max(), sequence_length)
        self._rows: list[list[int]] = []  # request numbers
        for first in range(0, len(lengths), _WINDOW):
            pieces, first_pieces = pack_window(
                lengths[first : first + _WINDOW], capacity=sequence_length, fit="best_fit"
            )
            numbers = pieces[:, 0].astype(np.int64) + first
            self._rows += [row.tolist() for row in np.split(numbers, first_pieces[1:-1])]
        self.num_samples = len(self._rows)

    def batch(self, samples: npt.NDArray[np.int64]) -> Batch:
        """Batch of the samples [B]."""
        shape = (len(samples), self.sequence_length)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        documents = np.zeros(shape, np.int32)
        for row, sample in enumerate(samples.tolist()):
            requests = [self._requests[number] for number in self._rows[sample]]
            own_labels = [request.labels() for request in requests]
            lengths = [len(each) for each in own_labels]
            end = sum(lengths)
            tokens[row, :end] = np.concatenate([request.ids[:-1] for request in requests])
            labels[row, :end] = np.concatenate(own_labels)
            documents[row, :end] = np.repeat(np.arange(len(requests)), lengths)
            documents[row, end:] = len(requests)
        return Batch(*(torch.from_numpy(field) for field in (tokens, labels, documents, samples.copy())))

    def request_numbers(self, samples: Tensor) -> Tensor:
        """[B, T] int64, the number of the request of each token of the samples [B]; 0 at padding."""
        numbers = np.zeros((len(samples), self.sequence_length), np.int64)
        for row, sample in enumerate(samples.tolist()):
            own = self._rows[sample] if sample >= 0 else []
            lengths = [len(self._requests[number].ids) - 1 for number in own]
            numbers[row, : sum(lengths)] = np.repeat(np.array(own, np.int64), lengths)
        return torch.from_numpy(numbers)
