"""Needles in a haystack: facts hidden at given depths of a long text, and a question about them (S-RT, M-RT)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import pydantic

from megalin.errors import ConfigError, DataError
from megalin.evaluation.tasks.draws import ExampleDraws
from megalin.evaluation.tasks.text_task import SHORTEST_CONTEXT, GenerationRequest, TextEncoder, TextTask, answer_tokens
from megalin.evaluation.tasks.words import pseudo_words, seven_digits

NOISE = (
    "The river runs past the mill.",
    "A cart waits near the gate.",
    "The baker lights the oven before dawn.",
    "Rain falls on the roof of the barn.",
    "The road leads over the hill and back.",
)
"""Sentences of the noise haystack, which repeat in this order."""
_INTRODUCTION = "The text below hides secret numbers. Remember them.\n"


class Needle(TextTask):
    """Facts "The secret number of mabedi is 4180233." in a haystack, and a question at the end of the prompt.

    Single-needle retrieval (S-RT) is one fact, multi-needle retrieval (M-RT) several in one question. A right answer
    contains every number. With depth x in [0, 1] and n needles, needle j (from 0) comes after the fraction
    x + j (1 - x) / n of the haystack.

    Source: Scaling Laws for Linear Complexity Language Models, appendix B.1 (modes); Rodimus, appendix D.8.
    """

    mode: Literal["easy", "standard"] = "standard"
    """standard: the haystack holds the fact alone. easy: it holds the question too, word for word."""
    depth: float = pydantic.Field(default=0.5, ge=0, le=1)
    """Place of the first needle: 0 is the start of the haystack, 1 its end."""
    num_needles: int = pydantic.Field(default=1, ge=1)
    """Facts that are hidden and asked for."""

    def request(
        self, encoder: TextEncoder, seed: int, number: int, documents: Sequence[Sequence[int]] | None = None
    ) -> GenerationRequest:
        """Request `number`. The needles depend on `seed` and `number` alone: the same at every depth and length.

        Args:
            documents: token ids of texts, which make up the haystack, from a random one on; None: noise.

        Raises:
            ConfigError: the smallest prompt and its answer are longer than `context_length`.
            DataError: the documents have too few tokens for `context_length`.
        """
        draws = ExampleDraws("needle", seed, number)
        names, numbers = pseudo_words(draws, self.num_needles), seven_digits(draws, self.num_needles)
        needles = [self._needle(name, value) for name, value in zip(names, numbers, strict=True)]
        places = [self.depth + j * (1 - self.depth) / self.num_needles for j in range(self.num_needles)]
        if documents is not None:
            first = draws.integer(0, len(documents) - 1) if documents else 0
            haystack = [*documents[first:], *documents[:first]]
            return self._in_documents(encoder, haystack, needles, places, question=_question(names), references=numbers)

        def text(num_sentences: int) -> str:
            sentences = [NOISE[k % len(NOISE)] for k in range(num_sentences)]
            for place, needle in reversed(list(zip(places, needles, strict=True))):
                sentences.insert(round(place * num_sentences), needle)
            return f"{_INTRODUCTION}{' '.join(sentences)}\n{_question(names)}"

        return self._request(encoder, text, numbers, depth=self.depth)

    def _needle(self, name: str, value: str) -> str:
        return f"{_question([name])} {value}." if self.mode == "easy" else f"The secret number of {name} is {value}."

    def _in_documents(
        self,
        encoder: TextEncoder,
        documents: Sequence[Sequence[int]],
        needles: Sequence[str],
        places: Sequence[float],
        *,
        question: str,
        references: Sequence[str],
    ) -> GenerationRequest:
        start, end = encoder.encode(_INTRODUCTION), encoder.encode(f"\n{question}")
        encoded = [encoder.encode(f"\n{needle}\n") for needle in needles]
        new_tokens = answer_tokens(encoder, references)
        room = self.context_length - new_tokens - sum(map(len, (start, end, *encoded)))
        if room < 0:
            raise ConfigError(
                f"context_length = {self.context_length}: needles, question and answer alone have "
                f"{self.context_length - room} tokens; raise it to that or more"
            )
        haystack: list[int] = []
        for document in documents:
            haystack.extend(document[: room - len(haystack)])
        if len(haystack) < room:
            raise DataError(
                f"the documents of the haystack have {len(haystack)} tokens, but context_length = "
                f"{self.context_length} takes {room}; give more documents or lower it"
            )
        prompt, filled = start, 0
        for place, needle in zip(places, encoded, strict=True):
            offset = round(place * room)
            prompt = [*prompt, *haystack[filled:offset], *needle]
            filled = offset
        prompt = [*prompt, *haystack[filled:], *end]
        return GenerationRequest(prompt, tuple(references), new_tokens, self.context_length, self.depth)


def needle_grid(needle: Needle, lengths: Sequence[int], num_depths: int) -> list[list[Needle]]:
    """`needle` at every depth and length: [depths, lengths], the depths evenly from 0 to 1, the lengths as given.

    Raises:
        ConfigError: no length, lengths that do not rise or are below SHORTEST_CONTEXT, or fewer than two depths.
    """
    if num_depths < 2:
        raise ConfigError(f"num_depths = {num_depths}: a grid needs at least 2 depths, the start and the end")
    if not lengths or any(a >= b for a, b in itertools.pairwise(lengths)):
        raise ConfigError(f"lengths = {list(lengths)}: give at least one context length, in rising order")
    if lengths[0] < SHORTEST_CONTEXT:
        raise ConfigError(
            f"a context of {lengths[0]} tokens is too short for a text and its question; use lengths of at least "
            f"{SHORTEST_CONTEXT}"
        )
    depths = [step / (num_depths - 1) for step in range(num_depths)]
    fields = needle.model_dump()
    return [
        [type(needle)(**{**fields, "depth": depth, "context_length": length}) for length in lengths] for depth in depths
    ]


def _question(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"Question: What is the secret number of {names[0]}? Answer:"
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"Question: What are the secret numbers of {listed}? Answer:"
