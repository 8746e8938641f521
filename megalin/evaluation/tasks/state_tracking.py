"""State tracking: parity, modular addition, the word problem of S5, palindromes and stacks.

The first three name their answer once, after the whole word: an answer at every position would stand in the input of
the next one, which would then need no memory of the word.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import reduce
from typing import Self

import numpy as np
import pydantic

from megalin.evaluation.tasks.draws import ExampleDraws
from megalin.evaluation.tasks.sequence_task import LabelledSequence, SequenceTask, labelled

Permutation = tuple[int, ...]

PERMUTATIONS: tuple[Permutation, ...] = tuple(itertools.permutations(range(5)))
"""The 120 elements of S5 in lexicographic order; id i stands for PERMUTATIONS[i], the map x -> PERMUTATIONS[i][x]."""
_NUMBER = {permutation: number for number, permutation in enumerate(PERMUTATIONS)}


class _Word(SequenceTask):
    """Base of the tasks with words of a random length, which is uniform in [min_length, max_length]."""

    min_length: int = pydantic.Field(default=1, ge=1)
    """Least length of a word, in symbols or operations."""
    max_length: int = pydantic.Field(default=64, ge=1)
    """Largest length of a word."""

    @pydantic.model_validator(mode="after")
    def _lengths_rise(self) -> Self:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length = {self.min_length} is above max_length = {self.max_length}; lower it")
        return self

    def _length(self, draws: ExampleDraws) -> int:
        return draws.integer(self.min_length, self.max_length)


class Parity(_Word):
    """x_1 ... x_n = y with bits x and y = x_1 + ... + x_n mod 2. Ids: the bits 0 and 1; 2 is "="."""

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return 3

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: n + 2 tokens, the last one a label."""
        draws = ExampleDraws("parity", seed, number)
        return _sum_mod(2, draws.integers(2, self._length(draws)).tolist())


class ModularAddition(_Word):
    """x_1 ... x_n = y with y = x_1 + ... + x_n mod m. Ids: the residues 0 to m - 1; m is "="."""

    modulus: int = pydantic.Field(default=5, ge=2)
    """m."""

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return self.modulus + 1

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: n + 2 tokens, the last one a label."""
        draws = ExampleDraws("modular_addition", seed, number)
        return _sum_mod(self.modulus, draws.integers(self.modulus, self._length(draws)).tolist())


class S5(_Word):
    """p_1 ... p_n = q with q = p_n o ... o p_1: p_1 is applied first. Ids: the 120 permutations; 120 is "=".

    Source: Merrill, Petty and Sabharwal, The Illusion of State in State-Space Models (2024).
    """

    max_length: int = pydantic.Field(default=16, ge=1)
    """Largest length of a word."""

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return len(PERMUTATIONS) + 1

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: n + 2 tokens, the last one a label."""
        draws = ExampleDraws("s5", seed, number)
        word = draws.integers(len(PERMUTATIONS), self._length(draws)).tolist()
        product = reduce(_then, (PERMUTATIONS[letter] for letter in word))
        return labelled([*word, len(PERMUTATIONS)], [_NUMBER[product]])


class Palindrome(_Word):
    """x_1 ... x_n | x_n ... x_1, where all of the second half are labels. Ids: the symbols; the next one is "|"."""

    num_symbols: int = pydantic.Field(default=64, ge=2)
    """Symbols that x is drawn from."""

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return self.num_symbols + 1

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: 2n + 1 tokens, the last n labels."""
        draws = ExampleDraws("palindrome", seed, number)
        word = draws.integers(self.num_symbols, self._length(draws)).tolist()
        return labelled([*word, self.num_symbols], word[::-1])


class Stack(_Word):
    """Operations of three tokens on several stacks: `push s x` and `pop s x`, where the popped x is a label.

    Of the n operations the first is a push, the last a pop. Each one between pops with probability 1/2 a random stack
    that is not empty, and otherwise pushes a random symbol on a random stack; it pushes where a pop would leave nothing
    to the last one, or all stacks are empty. Ids: 0 is push, 1 is pop, then the stacks, then the symbols.
    """

    min_length: int = pydantic.Field(default=2, ge=2)
    """Least number of operations."""
    max_length: int = pydantic.Field(default=32, ge=2)
    """Largest number of operations."""
    num_stacks: int = pydantic.Field(default=4, ge=1)
    """Number of stacks."""
    num_symbols: int = pydantic.Field(default=64, ge=2)
    """Symbols that are pushed."""

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return 2 + self.num_stacks + self.num_symbols

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: 3n tokens with a label in each pop."""
        draws = ExampleDraws("stack", seed, number)
        length = self._length(draws)
        stacks: list[list[int]] = [[] for _ in range(self.num_stacks)]
        tokens: list[int] = []
        for step in range(length):
            num_stored = sum(map(len, stacks))
            if step == length - 1:
                pops = True
            elif num_stored <= int(step == length - 2):  # the last pop needs a symbol
                pops = False
            else:
                pops = draws.fraction() < 0.5
            if pops:
                stack = draws.choice([stack for stack, symbols in enumerate(stacks) if symbols])
                symbol = stacks[stack].pop()
            else:
                stack, symbol = draws.integer(0, self.num_stacks - 1), draws.integer(0, self.num_symbols - 1)
                stacks[stack].append(symbol)
            tokens += [int(pops), 2 + stack, 2 + self.num_stacks + symbol]
        operations = np.array(tokens, np.int32).reshape(length, 3)
        label_mask = np.zeros((length, 3), np.bool_)
        label_mask[:, 2] = operations[:, 0] == 1
        return LabelledSequence(operations.reshape(-1), label_mask.reshape(-1))


def _sum_mod(modulus: int, terms: Sequence[int]) -> LabelledSequence:
    return labelled([*terms, modulus], [sum(terms) % modulus])


def _then(first: Permutation, second: Permutation) -> Permutation:
    """second o first."""
    return tuple(second[x] for x in first)
