"""Masked tokens and sentence pairs (BERT): a sample of a piece of text as a pure function of its number."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.config import MaskingConfig
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError
from megalin.parallel.cross_entropy import IGNORED_LABEL

TokenIds = npt.NDArray[np.int64]


class SpecialTokens(NamedTuple):
    """Ids of the special tokens of masked samples."""

    cls: int
    sep: int
    mask: int
    pad: int


class Vocabulary(NamedTuple):
    """Token ids for masking."""

    special: SpecialTokens
    ordinary: TokenIds
    """[n] ids for random replacements: all but the special ones."""


def resolve_tokens(config: MaskingConfig, tokenizer: Tokenizer | None, vocab_size: int) -> Vocabulary:
    """Resolves the special tokens of a config to ids of a model with `vocab_size` ids.

    Raises:
        ConfigError: names without a tokenizer or missing in it, ids beyond the vocabulary, or two special tokens with
            the same id; all are listed.
    """
    found: dict[str, int] = {}
    problems = []
    for field in ("cls_token", "sep_token", "mask_token", "pad_token"):
        value: int | str = getattr(config, field)
        where = f"data.masking.{field} = {value!r}"
        number = tokenizer.token_id(value) if isinstance(value, str) and tokenizer is not None else value
        if isinstance(number, str):
            problems.append(
                f"{where} is a name, but data.tokenizer is not set; give the token's id, or set the tokenizer"
            )
        elif number is None:
            problems.append(
                f"{where} is not in the tokenizer; train one with it (megalin data train-tokenizer --special-tokens), "
                "give an id that does not occur in text"
            )
        elif number >= vocab_size:
            problems.append(f"{where} has id {number}, but model.vocab_size = {vocab_size}; raise it to {number + 1}")
        elif number in found.values():
            problems.append(f"{where} has the id {number} of another special token; give each a different one")
        else:
            found[field] = number
    if problems:
        raise ConfigError("\n".join(problems))
    special = SpecialTokens(*found.values())
    ids = np.arange(vocab_size if tokenizer is None else tokenizer.vocab_size, dtype=np.int64)
    return Vocabulary(special, np.setdiff1d(ids, np.array(special)))


class Draws:
    """Hash-based random numbers of a sample: a pure function of (seed, split, sample), whatever the library."""

    def __init__(self, seed: int, split: str, sample: int) -> None:
        self._key = f"megalin masking {seed} {split} {sample}"

    def uniform(self, purpose: str, count: int) -> npt.NDArray[np.float64]:
        """[count] in [0, 1)."""
        material = hashlib.shake_256(f"{self._key} {purpose}".encode()).digest(8 * count)
        return (np.frombuffer(material, "<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, purpose: str, bound: int) -> int:
        """Integer in [0, bound)."""
        return int(self.uniform(purpose, 1)[0] * bound)


class MaskedSample(NamedTuple):
    """One sample of a batch; T tokens, P predictions."""

    tokens: TokenIds  # [T]
    token_types: TokenIds  # [T] 0 up to and with the first [SEP] and for padding, 1 for B and its [SEP]
    valid: npt.NDArray[np.bool_]  # [T] False at padding
    masked_positions: TokenIds  # [P] rising; 0 where there is no prediction
    masked_labels: TokenIds  # [P] the tokens before masking; IGNORED_LABEL where there is no prediction


def mask(
    first: TokenIds, second: TokenIds, config: MaskingConfig, vocabulary: Vocabulary, draws: Draws, *, length: int
) -> MaskedSample:
    """Builds [CLS] first [SEP] second [SEP], padded to `length`, and masks it.

    Exactly max(1, round(predicted_share * n)) of the n tokens of text, at most max_predictions, are predicted.
    """
    special, ordinary = vocabulary
    ends = np.array([1 + len(first), 2 + len(first) + len(second)])  # positions of the two [SEP]
    assert ends[1] < length, (len(first), len(second), length)
    tokens = np.full(length, special.pad, np.int64)
    tokens[0], tokens[ends] = special.cls, special.sep
    tokens[1 : ends[0]], tokens[ends[0] + 1 : ends[1]] = first, second
    token_types = np.zeros(length, np.int64)
    token_types[ends[0] + 1 : ends[1] + 1] = 1
    text = np.delete(np.arange(1, ends[1]), ends[0] - 1)  # positions
    count = min(config.max_predictions, max(1, round(config.predicted_share * len(text))))
    chosen = np.sort(text[np.argsort(draws.uniform("choose", len(text)), kind="stable")[:count]])
    positions = np.zeros(config.max_predictions, np.int64)
    labels = np.full(config.max_predictions, IGNORED_LABEL, np.int64)
    positions[:count], labels[:count] = chosen, tokens[chosen]
    fate = draws.uniform("fate", count)
    replacements = ordinary[(draws.uniform("replacement", count) * len(ordinary)).astype(np.int64)]
    kept_or_random = np.where(fate < config.mask_share + config.random_share, replacements, tokens[chosen])
    tokens[chosen] = np.where(fate < config.mask_share, special.mask, kept_or_random)
    return MaskedSample(tokens, token_types, np.arange(length) <= ends[1], positions, labels)
