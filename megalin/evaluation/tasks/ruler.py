"""A RULER-like set: needles among many of their kind, chains of variables, and the most frequent words of a list.

Source: Hsieh et al., RULER (2024). The tasks and their sizes are those of the paper; the sentences are ours, the words
are invented (`words.pseudo_words`), and no prompt has a solved example.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import pydantic

from megalin.evaluation.tasks.draws import ExampleDraws
from megalin.evaluation.tasks.needle import NOISE
from megalin.evaluation.tasks.text_task import GenerationRequest, TextEncoder, TextTask
from megalin.evaluation.tasks.words import pseudo_words, seven_digits, uuids

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NAME_LETTERS = 5


class NoiseNeedle(TextTask):
    """niah_single_1: one fact at a random place of a haystack of noise; a word is the key, 7 digits are the value."""

    def request(self, encoder: TextEncoder, seed: int, number: int) -> GenerationRequest:
        """Request `number`."""
        draws = ExampleDraws("niah_single_1", seed, number)
        (key,), (value,) = pseudo_words(draws, 1), seven_digits(draws, 1)
        place = draws.fraction()

        def text(num_sentences: int) -> str:
            sentences = [NOISE[k % len(NOISE)] for k in range(num_sentences)]
            sentences.insert(round(place * num_sentences), _fact(key, value))
            return f"{' '.join(sentences)}\n{_question(key)}"

        return self._request(encoder, text, [value], depth=place)


class MultikeyNeedle(TextTask):
    """niah_multikey_2 and _3: a haystack made of facts alone, one of which is asked for.

    The fact that is asked for is at a random place; its depth is that place.
    """

    kind: Literal["words", "uuids"] = "words"
    """words: keys are words and values 7 digits (multikey_2). uuids: keys and values are uuids (multikey_3)."""

    def request(self, encoder: TextEncoder, seed: int, number: int) -> GenerationRequest:
        """Request `number`."""
        place = ExampleDraws("niah_multikey place", seed, number).fraction()
        pairs = self._pairs(seed, number, 1)
        key, value = pairs[0]

        def text(num_others: int) -> str:
            if num_others >= len(pairs):
                pairs[:] = self._pairs(seed, number, 2 * num_others)
            facts = [_fact(*pair) for pair in pairs[1 : num_others + 1]]
            facts.insert(round(place * num_others), _fact(key, value))
            return "\n".join([*facts, _question(key)])

        return self._request(encoder, text, [value], least=1, depth=place)

    def _pairs(self, seed: int, number: int, count: int) -> list[tuple[str, str]]:
        """[count] keys and values; the first ones are the same, however many follow."""
        keys, values = (ExampleDraws(f"niah_multikey {part}", seed, number) for part in ("keys", "values"))
        if self.kind == "uuids":
            return list(zip(uuids(keys, count), uuids(values, count), strict=True))
        return list(zip(pseudo_words(keys, count), seven_digits(values, count), strict=True))


class VariableTracking(TextTask):
    """Chains of assignments in a haystack of noise: VAR A = 1234567, VAR B = VAR A, ...

    The first chain's value is asked for; a right answer names all of its num_hops + 1 variables. Each chain stands in
    the order of its assignments; chains are mixed. The depth is that of the first chain's first assignment.
    """

    num_chains: int = pydantic.Field(default=1, ge=1)
    """Chains with different values; one of them is asked for."""
    num_hops: int = pydantic.Field(default=4, ge=1)
    """Assignments of a variable to the next one in a chain."""

    def request(self, encoder: TextEncoder, seed: int, number: int) -> GenerationRequest:
        """Request `number`."""
        draws = ExampleDraws("variable_tracking", seed, number)
        length = self.num_hops + 1
        codes = draws.distinct(len(_LETTERS) ** _NAME_LETTERS, self.num_chains * length).tolist()
        names = [_variable(code) for code in codes]
        values = seven_digits(draws, self.num_chains)
        statements: list[tuple[float, str]] = []
        for chain, value in enumerate(values):
            sources = [value, *(f"VAR {name}" for name in names[chain * length : (chain + 1) * length])]
            places = sorted(draws.uniform(length).tolist())
            statements += [(places[k], f"{sources[k + 1]} = {sources[k]}.") for k in range(length)]
        depth = statements[0][0]
        statements.sort(key=lambda statement: statement[0])

        def text(num_sentences: int) -> str:
            sentences = [NOISE[k % len(NOISE)] for k in range(num_sentences)]
            for place, statement in reversed(statements):
                sentences.insert(round(place * num_sentences), statement)
            question = f"Question: Find all variables that have the value {values[0]}. Answer:"
            return f"{' '.join(sentences)}\n{question}"

        return self._request(encoder, text, names[:length], depth=depth)


class CommonWords(TextTask):
    """A numbered list in which some words stand often and the others rarely; the common ones are asked for."""

    num_common: int = pydantic.Field(default=10, ge=1)
    """Words that stand often."""
    common_repeats: int = pydantic.Field(default=30, ge=2)
    """Times that each of them stands in the list."""
    rare_repeats: int = pydantic.Field(default=3, ge=1)
    """Times that each other word stands in the list."""

    @pydantic.model_validator(mode="after")
    def _common_words_are_common(self) -> Self:
        if self.common_repeats <= self.rare_repeats:
            raise ValueError(
                f"common_repeats = {self.common_repeats} must be above rare_repeats = {self.rare_repeats}; raise it"
            )
        return self

    def request(self, encoder: TextEncoder, seed: int, number: int) -> GenerationRequest:
        """Request `number`."""

        def text(num_rare: int) -> str:
            counts = [self.common_repeats] * self.num_common + [self.rare_repeats] * num_rare
            words = _shuffled_words("common_words", seed, number, counts)
            listed = " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))
            question = f"Question: Find the {self.num_common} most frequent words of this list. Answer:"
            return f"{listed}\n{question}"

        common = pseudo_words(ExampleDraws("common_words", seed, number), self.num_common)
        return self._request(encoder, text, common, least=1)


class FrequentWords(TextTask):
    """A text of words whose frequencies fall like a power of their rank; the most frequent ones are asked for.

    The word of rank r stands floor(m r^(-alpha)) times, with the largest m that fits.
    """

    num_frequent: int = pydantic.Field(default=3, ge=1)
    """Words that are asked for."""
    alpha: float = pydantic.Field(default=2.0, gt=1, le=4)
    """Exponent of the frequencies."""

    def request(self, encoder: TextEncoder, seed: int, number: int) -> GenerationRequest:
        """Request `number`."""

        def text(most: int) -> str:
            num_words = int(most ** (1 / self.alpha)) + 1
            counts = [int(most * rank**-self.alpha) for rank in range(1, num_words + 1)]
            words = _shuffled_words("frequent_words", seed, number, counts)
            question = f"Question: Find the {self.num_frequent} most frequent words of this text. Answer:"
            return f"{' '.join(words)}\n{question}"

        frequent = pseudo_words(ExampleDraws("frequent_words", seed, number), self.num_frequent)
        last, next_one = (float(rank) ** -self.alpha for rank in (self.num_frequent, self.num_frequent + 1))
        return self._request(encoder, text, frequent, least=math.ceil(1 / (last - next_one)))


def _fact(key: str, value: str) -> str:
    return f"The secret code of {key} is {value}."


def _question(key: str) -> str:
    return f"Question: What is the secret code of {key}? Answer: The secret code of {key} is"


def _variable(code: int) -> str:
    letters = []
    for _ in range(_NAME_LETTERS):
        code, letter = divmod(code, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


def _shuffled_words(task: str, seed: int, number: int, counts: list[int]) -> list[str]:
    """Word k of the example `counts[k]` times, in random order; the first words are the same for any `counts`."""
    words = pseudo_words(ExampleDraws(task, seed, number), len(counts))
    repeated = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    order = ExampleDraws(f"{task} order", seed, number).order(len(repeated))
    return [repeated[place] for place in order.tolist()]
