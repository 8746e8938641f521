"""Tasks on text: prompts of a given number of tokens, whose answers a model writes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import pydantic

from megalin.config import Config
from megalin.errors import ConfigError

_SPARE_TOKENS = 16  # to generate beyond the answer, for words before it or other spacing
SHORTEST_CONTEXT = 64
"""Least `context_length`."""


class TextEncoder(Protocol):
    """Part of a tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without tokens of begin and end."""


class GenerationRequest(NamedTuple):
    """A prompt that a model continues, and the strings that a right answer contains."""

    prompt: list[int]
    references: tuple[str, ...]
    new_tokens: int
    """Tokens to generate: those of the answer, and a few more."""
    length: int
    """Most tokens of prompt and answer, as the task was given: the L of acc@L."""
    depth: float | None
    """Place of the first needle, from 0 (start of the haystack) to 1 (its end); None where a task has no such place."""


def fraction_found(output: str, references: Sequence[str]) -> float:
    """Fraction of the references that occur in the output, upper and lower case being equal."""
    assert references
    text = output.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


class TextTask(Config, abc.ABC):
    """Base of the tasks on text; its fields are the parameters of the generator."""

    context_length: int = pydantic.Field(default=4096, ge=SHORTEST_CONTEXT)
    """Most tokens of the prompt and of the answer together. The haystack is as long as fits."""

    @abc.abstractmethod
    def request(self, encoder: TextEncoder, seed: int, number: int) -> GenerationRequest:
        """Request `number` (>= 0), a pure function of the task's fields, the tokenizer, `seed` and `number`.

        Raises:
            ConfigError: the smallest prompt of the task and its answer are longer than `context_length`.
        """

    def _request(
        self,
        encoder: TextEncoder,
        text: Callable[[int], str],
        references: Sequence[str],
        *,
        least: int = 0,
        depth: float | None = None,
    ) -> GenerationRequest:
        """The longest prompt that fits: `text(n)` of n units of haystack, n >= `least`. More units give more tokens."""
        new_tokens = answer_tokens(encoder, references)
        prompt = longest_prompt(lambda n: encoder.encode(text(n)), self.context_length - new_tokens, least=least)
        if prompt is None:
            needed = len(encoder.encode(text(least))) + new_tokens
            raise ConfigError(
                f"context_length = {self.context_length}: the shortest prompt with its answer has {needed} tokens; "
                "raise it to that or more"
            )
        return GenerationRequest(prompt, tuple(references), new_tokens, self.context_length, depth)


def answer_tokens(encoder: TextEncoder, references: Sequence[str]) -> int:
    """Tokens to generate for an answer that names all references."""
    return len(encoder.encode(" " + ", ".join(references))) + _SPARE_TOKENS


def longest_prompt(encode: Callable[[int], list[int]], limit: int, *, least: int) -> list[int] | None:
    """Ids `encode(n)` of the largest n >= `least` with at most `limit` of them; None where even `least` has more.

    The number of ids has to grow with n, about linearly: then a few calls are enough. Every second probe halves the
    interval, so that there are never many.
    """
    low, ids = least, encode(least)
    if len(ids) > limit:
        return None
    low_tokens, high, high_tokens = len(ids), 2 * least + 16, -1
    while True:  # an interval whose upper end does not fit
        probe = encode(high)
        if len(probe) > limit:
            high_tokens = len(probe)
            break
        low, low_tokens, ids, high = high, len(probe), probe, 2 * high
    halves = False
    while high - low > 1:
        by_slope = low + int((limit - low_tokens) * (high - low) / (high_tokens - low_tokens))
        middle = (low + high) // 2 if halves else min(max(by_slope, low + 1), high - 1)
        probe = encode(middle)
        if len(probe) > limit:
            high, high_tokens = middle, len(probe)
        else:
            low, low_tokens, ids = middle, len(probe), probe
        halves = not halves
    return ids
