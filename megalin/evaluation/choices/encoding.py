"""Token ids of requests, split into prompt and answer as the harness lm-eval splits them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.tokenizers.special_tokens import SpecialTokenRule, special_tokens_of
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError, DataError
from megalin.evaluation.choices.requests import Request, Task
from megalin.parallel.cross_entropy import IGNORED_LABEL

_ENCODED_TOGETHER = 1024  # texts


class EncodedRequest(NamedTuple):
    """Ids of a request; at least one of the prompt stands before the answer."""

    ids: Sequence[int]
    """Prompt and answer."""
    num_answer_tokens: int
    """Tokens of the answer, the last ones."""

    @property
    def prompt(self) -> Sequence[int]:
        """Ids of the prompt."""
        return self.ids[: -self.num_answer_tokens]

    def labels(self) -> npt.NDArray[np.int64]:
        """[n - 1] label of each id but the last: the next id where it is part of the answer, else IGNORED_LABEL."""
        labels = np.full(len(self.ids) - 1, IGNORED_LABEL, np.int64)
        labels[-self.num_answer_tokens :] = self.ids[-self.num_answer_tokens :]
        return labels


class EncodedTask(NamedTuple):
    """The requests of a task as ids."""

    task: Task
    requests: list[EncodedRequest]
    """In the order of `Task.requests`."""
    num_truncated: int
    """Requests that lost tokens on the left."""
    num_merged: int
    """Requests whose answer merges with its prompt."""


def encode_task(
    task: Task, tokenizer: Tokenizer, *, max_tokens: int, special_tokens: SpecialTokenRule | None = None
) -> EncodedTask:
    """Encodes a task as lm-eval does: prompt and answer together, split after as many ids as the prompt has alone;
    spaces at the end of the prompt count to the answer. A prompt without text is the prefix id of `special_tokens`.

    An answer may merge with its prompt, so that both together have other ids than the prompt alone. One that then has
    no id of its own is scored by the last id of both.

    Args:
        max_tokens: tokens that a model reads at once. A request of more than `max_tokens` + 1 ids (the last one is
            only predicted) loses ids on the left.
        special_tokens: None: those that the tokenizer has by default.

    Raises:
        DataError: an answer of more than `max_tokens` tokens, whose probability would miss some; or a request of none.
    """
    special = special_tokens_of(tokenizer, None) if special_tokens is None else special_tokens
    encoder = special.encoder(tokenizer)
    texts = [_moved_spaces(request) for request in task.requests()]
    contexts = list(dict.fromkeys(context for context, _ in texts if context))
    prompts = {"": [special.prefix_id]} | dict(zip(contexts, _encode(encoder, contexts), strict=True))
    after_prompts = _encode(encoder, [context + continuation for context, continuation in texts if context])
    alone = _encode(tokenizer, [continuation for context, continuation in texts if not context])
    encoded, num_truncated, num_merged = [], 0, 0
    for context, continuation in texts:
        prompt = prompts[context]
        whole = next(after_prompts) if context else [*prompt, *next(alone)]
        answer = whole[len(prompt) :]
        num_merged += whole[: len(prompt)] != prompt
        if not answer and context and whole:
            num_merged += whole == prompt
            prompt, answer = whole[:-1], whole[-1:]
        if not answer:
            raise DataError(
                f"{task.name}: the answer {continuation!r} has no token, nor has its prompt, which ends with "
                f"{context[-20:]!r}; leave the task out for this tokenizer"
            )
        if len(answer) > max_tokens:
            raise DataError(
                f"{task.name}: an answer has {len(answer)} tokens, more than the {max_tokens} of data.sequence_length, "
                "so that its probability would miss some; use longer sequences or leave the task out"
            )
        ids = (prompt or [special.prefix_id]) + answer
        num_truncated += len(ids) > max_tokens + 1
        encoded.append(EncodedRequest(array("i", ids[-(max_tokens + 1) :]), len(answer)))
    return EncodedTask(task, encoded, num_truncated, num_merged)


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yields the ids of each text; the pieces of some of them are in memory at a time."""
    for first in range(0, len(texts), _ENCODED_TOGETHER):
        yield from tokenizer.encode_batch(texts[first : first + _ENCODED_TOGETHER])


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError where the tokenizer has ids that the model does not have."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"data.tokenizer has {tokenizer.vocab_size} ids, but the model only {vocab_size}; use the run's own "
            "tokenizer"
        )


def _moved_spaces(request: Request) -> tuple[str, str]:
    """Context and continuation, with the white space at the end of the context moved to the continuation."""
    context = request.context.rstrip()
    return context, request.context[len(context) :] + request.continuation


def distinct_prompts(requests: Sequence[EncodedRequest]) -> dict[tuple[int, ...], list[int]]:
    """The numbers of the requests that have the same prompt, by its ids, in order of their first request."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault(tuple(request.prompt), []).append(number)
    return groups
