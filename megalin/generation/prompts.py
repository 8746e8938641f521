"""Prompts of a JSON Lines file, their ids, and the checks that they pass before any work starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError, DataError
from megalin.structured_text import parse_json

MOST_PROBLEMS = 8
"""Problems that one error lists."""


class Prompt(NamedTuple):
    """A text to continue."""

    text: str
    source: str
    """Its place for error messages: "FILE, line 3", or "the prompt"."""
    fields: dict[str, Any]
    """The line's object, which the output repeats."""


def read_prompts(lines: Iterable[bytes], name: str) -> list[Prompt]:
    """The prompts of JSON Lines, one object with a string "prompt" a line; blank lines are skipped.

    Args:
        name: the file's name for error messages.

    Raises:
        DataError: lines that are none, each with its number, or no prompts.
    """
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        source = f"{name}, line {number}"
        try:
            fields = parse_json(line)
        except ValueError as error:
            problems.append(f"{source}: not JSON ({error}); write one object a line")
            continue
        text = fields.get("prompt") if isinstance(fields, dict) else None
        if isinstance(text, str) and _is_unicode(text):
            prompts.append(Prompt(text, source, fields))
        else:
            problems.append(f'{source}: expected an object with a string "prompt"; found {repr(fields)[:60]}')
    if problems:
        raise DataError(shortened(problems))
    if not prompts:
        raise DataError(f'{name}: no prompts; write one object with a string "prompt" a line')
    return prompts


def check_text(text: str, name: str) -> str:
    """Returns a text from a command line or standard input. Raises DataError where its bytes were not UTF-8."""
    if not _is_unicode(text):
        raise DataError(f"{name} is not UTF-8; convert it to UTF-8, for example with iconv")
    return text


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which no tokenizer can encode: a JSON escape, or a byte outside of UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
    """The ids of texts to continue.

    Args:
        special_tokens: put the special ids before each that the tokenizer has for the begin of a text, such as BOS, for
            a model whose documents were made so (`megalin data preprocess --special-tokens`). Ids that it adds after a
            text, such as the end of a sentence, would end the text to continue, and are left out.

    Raises:
        ConfigError: special tokens of a tokenizer that adds none before a text.
    """
    ids = tokenizer.encode_batch(list(texts))
    if not special_tokens:
        return ids
    first = tokenizer.special.before
    if not first:
        raise ConfigError(
            "special tokens before the prompts: this tokenizer adds none before a text; leave --special-tokens "
            "(special_tokens=True) out"
        )
    return [[*first, *each] for each in ids]


def completion_text(tokenizer: Tokenizer, prompt: Sequence[int], completion: Sequence[int]) -> str:
    """Text that the ids of a completion add to that of their prompt.

    A decoder may treat the first id of a text in its own way: SentencePiece, Metaspace and Strip drop its space. So the
    completion is decoded after its prompt. Special ids before the prompt have no part in it. A decoder that revises the
    prompt's end, as byte fallback does before bytes that are not UTF-8, decodes the completion after another text.
    """
    before = len(tokenizer.special.before)
    if before and tuple(prompt[:before]) == tokenizer.special.before:
        prompt = prompt[before:]
    for begin in (prompt, tokenizer.encode("a") if prompt else []):
        text = tokenizer.decode(begin)
        whole = tokenizer.decode([*begin, *completion])
        if whole.startswith(text):
            return whole[len(text) :]
    return tokenizer.decode(completion)


def check_prompts(
    prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], *, max_tokens: int, positions: int | None
) -> None:
    """Raises ConfigError for prompts without tokens, and for those that leave no room for `max_tokens`.

    Args:
        ids: the tokens of each prompt.
        positions: tokens that a sequence may have (`GenerationRun.positions`); None: any number.
    """
    problems = []
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            problems.append(f"{prompt.source} has no tokens; give some text")
        elif positions is not None and len(tokens) + max_tokens > positions:
            problems.append(
                f"{prompt.source} has {len(tokens)} tokens; with {max_tokens} new ones that is more than the "
                f"{positions} positions of this model (of softmax attention data.sequence_length, of learned "
                "absolute_positions max_positions); shorten the prompt or generate fewer tokens"
            )
    if problems:
        raise ConfigError(shortened(problems))


def shortened(problems: Sequence[str]) -> str:
    """The problems, one a line, at most MOST_PROBLEMS of them."""
    more = len(problems) - MOST_PROBLEMS
    return "\n".join([*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])])
