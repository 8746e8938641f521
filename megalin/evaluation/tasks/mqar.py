"""Multi-query associative recall (MQAR): keys with values, then the keys again, each followed by its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
import pydantic

from megalin.evaluation.tasks.draws import ExampleDraws
from megalin.evaluation.tasks.sequence_task import LabelledSequence, SequenceTask

PADDING = 0
"""Id between the queries with filler = "padding"; it is no key and no value."""


class MQAR(SequenceTask):
    """k_1 v_1 ... k_P v_P, then each key once more at a random place, followed by its value, the answer.

    Keys are P different ids of [1, V/2), values P different ids of [V/2, V). The rest of the sequence is
    (T - 2P) / 2 places of two tokens. Pair p takes place g_p, where the places are drawn without replacement with
    probability in proportion to (g + 1)^(a - 1); all other places hold filler.

    Source: Arora et al., Zoology (2023). There the input holds no answers; here a label is the next token, so that the
    answer stands in the text after its query. No key is queried twice.
    """

    sequence_length: int = pydantic.Field(default=64, ge=4)
    """T, tokens of an example; even."""
    num_pairs: int = pydantic.Field(default=4, ge=1)
    """P, pairs of a key and a value; at most T / 4."""
    vocab_size: int = pydantic.Field(default=8192, ge=4)
    """V, ids; even. Half of them serve as keys, half as values."""
    power: float = pydantic.Field(default=0.01, gt=0, le=1)
    """Exponent a of the gaps: a small one puts most queries early, 1 spreads them evenly."""
    filler: Literal["random", "padding"] = "random"
    """Tokens between the queries. random: any ids, as in the mix of 2026. padding: id 0, as in the sets of 2023."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        problems = []
        if self.sequence_length % 2:
            problems.append(f"sequence_length = {self.sequence_length} is odd; keys and values need an even number")
        if 4 * self.num_pairs > self.sequence_length:
            problems.append(
                f"num_pairs = {self.num_pairs} do not fit sequence_length = {self.sequence_length}: each pair takes 4 "
                f"tokens, two of them as a query; use at most {self.sequence_length // 4} pairs"
            )
        if self.vocab_size % 2:
            problems.append(f"vocab_size = {self.vocab_size} is odd; half of it are keys: use an even number")
        elif self.num_pairs > self.vocab_size // 2 - 1:
            problems.append(
                f"vocab_size = {self.vocab_size} has {self.vocab_size // 2 - 1} keys for num_pairs = {self.num_pairs}; "
                f"use at least {2 * (self.num_pairs + 1)}"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return self.vocab_size

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: T tokens with P labels."""
        pairs, length, half = self.num_pairs, self.sequence_length, self.vocab_size // 2
        draws = ExampleDraws(f"mqar {length} {pairs}", seed, number)  # sets of one mix share no keys
        keys, values = 1 + draws.distinct(half - 1, pairs), half + draws.distinct(half, pairs)
        weights = np.arange(1, length // 2 - pairs + 1, dtype=np.float64) ** (self.power - 1)
        queries = 2 * (pairs + draws.weighted_distinct(weights, pairs))  # [P] positions
        if self.filler == "random":
            tokens = draws.integers(self.vocab_size, length).astype(np.int32)
        else:
            tokens = np.full(length, PADDING, np.int32)
        tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
        tokens[queries], tokens[queries + 1] = keys, values
        label_mask = np.zeros(length, np.bool_)
        label_mask[queries + 1] = True
        return LabelledSequence(tokens, label_mask)


class MQARSet(NamedTuple):
    """Examples of one length and number of pairs."""

    task: MQAR
    num_examples: int


class MQARSetting(NamedTuple):
    """A published choice of training and test sets."""

    train: tuple[MQARSet, ...]
    test: tuple[MQARSet, ...]


def _sets(filler: Literal["random", "padding"], num_examples: int, *sizes: tuple[int, int]) -> tuple[MQARSet, ...]:
    return tuple(
        MQARSet(MQAR(sequence_length=length, num_pairs=pairs, filler=filler), num_examples) for length, pairs in sizes
    )


_SIZES_2023 = ((64, 4), (128, 8), (256, 16), (512, 64))

MQAR_SETTINGS: Mapping[str, MQARSetting] = {
    "2023": MQARSetting(train=_sets("padding", 100_000, *_SIZES_2023), test=_sets("padding", 3_000, *_SIZES_2023)),
    "2026": MQARSetting(
        train=(
            *_sets("random", 100_000, (64, 4)),
            *_sets("random", 20_000, (128, 8), (256, 16), (256, 32), (256, 64)),
        ),
        test=_sets("random", 1_000, (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)),
    ),
}
"""Settings by year. 2023: one model per set. 2026: one model is trained on all sets, and tested up to 1024 tokens."""
