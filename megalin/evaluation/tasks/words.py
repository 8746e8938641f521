"""Pseudo-words, numbers and uuids for prompts."""

from __future__ import annotations

import uuid

from megalin.evaluation.tasks.draws import ExampleDraws

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_WORD_SYLLABLES = 3
NUM_WORDS = len(_SYLLABLES) ** _WORD_SYLLABLES
"""343,000."""
_HEX_DIGITS = 32


def pseudo_words(draws: ExampleDraws, count: int) -> list[str]:
    """Different words of three syllables, as "mabedi".

    A list of English words would be a dependency with another content in each version, and models know some of its
    words better than others. Invented ones are the same everywhere, and equally strange to every model; all have six
    letters, so that none contains another one, which an answer is searched for.
    """
    return [_word(number) for number in draws.distinct(NUM_WORDS, count).tolist()]


def _word(number: int) -> str:
    syllables = []
    for _ in range(_WORD_SYLLABLES):
        number, syllable = divmod(number, len(_SYLLABLES))
        syllables.append(_SYLLABLES[syllable])
    return "".join(syllables)


def seven_digits(draws: ExampleDraws, count: int) -> list[str]:
    """Different numbers of seven digits."""
    return [str(1_000_000 + number) for number in draws.distinct(9_000_000, count).tolist()]


def uuids(draws: ExampleDraws, count: int) -> list[str]:
    """Random uuids of version 4, as text."""
    digits = draws.integers(16, count * _HEX_DIGITS).reshape(count, _HEX_DIGITS).tolist()
    return [str(uuid.UUID("".join(f"{digit:x}" for digit in row), version=4)) for row in digits]
