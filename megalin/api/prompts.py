"""Prompts of `CausalLM.generate` in their kinds: texts, lists of ids and tensors, and completions of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError
from megalin.generation.prompts import completion_text, encode_prompts

PromptT = TypeVar("PromptT", str, list[str], list[int], list[list[int]], Tensor)
"""A text, texts, ids, lists of ids, or ids as a tensor [T] or [B, T]."""


class PromptIds(NamedTuple):
    """Prompts as ids, and the way back to their kind."""

    ids: list[list[int]]
    of_kind: Callable[[list[list[int]]], Any]
    """Turns a completion of each prompt, as ids, into the kind of the prompts."""


def prompt_ids(
    prompts: Any, tokenizer: Tokenizer | None, *, stop_ids: Sequence[int], special_tokens: bool = False
) -> PromptIds:
    """The ids of prompts of any kind; `special_tokens` of texts as in `encode_prompts`.

    Raises:
        ConfigError: texts without a tokenizer, prompts of another kind, or special tokens where there are none.
    """
    if isinstance(prompts, Tensor):
        return _of_tensor(prompts, stop_ids)
    single = isinstance(prompts, str) or (isinstance(prompts, list | tuple) and _are(prompts, int))
    several: Sequence[Any] = [prompts] if single else prompts
    if isinstance(several, list | tuple) and _are(several, str):
        if tokenizer is None:
            raise ConfigError(
                "prompts of text, but the model has no tokenizer; give lists of ids, or set model.tokenizer = "
                "megalin.datasets.load_tokenizer(PATH)"
            )
        ids = encode_prompts(tokenizer, several, special_tokens=special_tokens)

        def texts(found: list[list[int]]) -> str | list[str]:
            made = [completion_text(tokenizer, *pair) for pair in zip(ids, found, strict=True)]
            return made[0] if single else made

        return PromptIds(ids, texts)
    if not isinstance(several, list | tuple) or not all(_are(each, int) for each in several):
        raise ConfigError(
            f"prompts of type {type(prompts).__name__}: give a text, a list of texts, a list of ids, a list of such "
            "lists, or a tensor of ids"
        )
    return PromptIds([list(each) for each in several], lambda found: found[0] if single else found)


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )


def _of_tensor(prompts: Tensor, stop_ids: Sequence[int]) -> PromptIds:
    if prompts.dim() not in (1, 2) or prompts.is_floating_point() or prompts.is_complex():
        raise ConfigError(
            f"prompts of shape {list(prompts.shape)} and dtype {prompts.dtype}: give ids as an integer tensor [T] or "
            "[B, T]"
        )

    def of_kind(found: list[list[int]]) -> Tensor:
        width = max(len(each) for each in found)
        rows = [each + [*stop_ids[:1]] * (width - len(each)) for each in found]  # only a stop id makes one shorter
        made = torch.tensor(rows, dtype=torch.int64, device=prompts.device)
        return made[0] if prompts.dim() == 1 else made

    return PromptIds((prompts[None] if prompts.dim() == 1 else prompts).tolist(), of_kind)
