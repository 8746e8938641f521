"""Special tokens around a model's texts: one rule for choice tasks, lm-eval and exports."""

from __future__ import annotations

from typing import NamedTuple

from megalin.data.tokenizers.tokenizer import Tokenizer, WithSpecialTokens
from megalin.errors import ConfigError


class SpecialTokenRule(NamedTuple):
    """Special tokens of the texts that a model is evaluated on."""

    added: bool
    """Whether each text has the tokenizer's special ids around it."""
    prefix_id: int
    """The id before a text without a context: BOS, or else the end of a document."""

    def encoder(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with these special tokens."""
        return WithSpecialTokens(tokenizer) if self.added else tokenizer


def special_tokens_of(tokenizer: Tokenizer, asked: bool | None) -> SpecialTokenRule:
    """The special tokens of a model's texts, those of lm-eval's `hf` model unless they are asked for or off.

    Args:
        asked: add them or not (`data.special_tokens`, an option); None: as the tokenizer does by default.

    Raises:
        ConfigError: asked for, but the tokenizer has none.
    """
    special = tokenizer.special
    if asked and not (special.before or special.after):
        raise ConfigError(
            "special tokens: this tokenizer has none to put around a text; leave --special-tokens "
            "(data.special_tokens = true) out"
        )
    added = special.by_default if asked is None else asked
    if asked is False:
        begin = None
    elif special.begin is None and added:
        begin = next(iter(special.before), None)
    else:
        begin = special.begin
    return SpecialTokenRule(added, tokenizer.eod_id if begin is None else begin)
