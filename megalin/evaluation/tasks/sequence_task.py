"""Tasks on token ids: sequences whose answers are tokens, with a mask of the tokens that count as labels."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.config import Config


class LabelledSequence(NamedTuple):
    """One example: a document of a model's token ids."""

    tokens: npt.NDArray[np.int32]
    """[T] ids, each below the task's `vocab_size`."""
    label_mask: npt.NDArray[np.bool_]
    """[T] true where the token is an answer: it is predicted from the tokens before it and counts in the loss."""


class SequenceTask(Config, abc.ABC):
    """Base of the tasks on token ids; its fields are the parameters of the generator."""

    @property
    @abc.abstractmethod
    def num_ids(self) -> int:
        """Number of token ids: the least vocabulary of a model of this task."""

    @abc.abstractmethod
    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number` (>= 0), a pure function of the task's fields, `seed` and `number`."""


def split_seed(seed: int, split: Literal["train", "test"]) -> int:
    """Seed of a split: 2 seed for "train", 2 seed + 1 for "test", so that no two splits of any seeds share draws."""
    return 2 * seed + (split == "test")


def labelled(prompt: Iterable[int], answer: Iterable[int]) -> LabelledSequence:
    """A prompt followed by its answer, the only labels."""
    ids = list(prompt)
    num_prompt = len(ids)
    ids.extend(answer)
    tokens = np.array(ids, np.int32)
    return LabelledSequence(tokens, np.arange(tokens.size) >= num_prompt)
