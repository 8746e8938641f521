"""Cache of the token ids of words: most words of a corpus have occurred before, and a look-up is cheap."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

# GPT-2's rule: a contraction; or letters, digits or signs with the space before them; or white space except the last
# before a word. For ASCII it is spelled out here; a run next to a non-ASCII character becomes one piece up to the next
# white space, which the encoder splits further. White space is Unicode's, which differs slightly from Python's \s.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ASCII_RUNS = (f" ?[{run}]++(?![^\x00-\x7f])" for run in ("A-Za-z", "0-9", r"\x00-\x08\x0e-\x1f!-/:-@\[-`{-\x7f"))
_PIECES = re.compile(
    f"'(?:[sdmt]|ll|ve|re)|{'|'.join(_ASCII_RUNS)}| ?[^{_SPACE}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]"
)
_MOST_PIECES = 1 << 18  # some 64 MB
_LONGEST_PIECE = 64  # characters; longer ones rarely repeat


class WordCache:
    """Encodes texts piece by piece with an encoder of GPT-2's rule, in bounded memory and with the same ids."""

    def __init__(self, encode_batch: Callable[[Sequence[str]], list[list[int]]]) -> None:
        """Takes the encoder: `encode_batch` returns the ids of each piece."""
        self._encode_batch = encode_batch
        self._ids: dict[str, list[int]] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        cut = [_PIECES.findall(text) for text in texts]
        unknown = list(set().union(*cut).difference(self._ids))
        self._ids.update(zip(unknown, self._encode_batch(unknown), strict=True))
        found = [list(itertools.chain.from_iterable(map(self._ids.__getitem__, pieces))) for pieces in cut]
        if len(self._ids) > _MOST_PIECES:
            self._ids.clear()
        else:
            for piece in unknown:
                if len(piece) > _LONGEST_PIECE:
                    del self._ids[piece]
        return found


def cuts_as_gpt2(tokenizer: dict[str, Any]) -> bool:
    """True where a tokenizer.json encodes pieces independently: byte-level BPE, GPT-2's rule, no normalizer."""
    model, before = tokenizer.get("model"), tokenizer.get("pre_tokenizer")
    return (
        tokenizer.get("normalizer") is None
        and isinstance(before, dict)
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True) is True
        and before.get("add_prefix_space") is False
        and isinstance(model, dict)
        and model.get("type") == "BPE"
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and all(token.get("special") for token in tokenizer.get("added_tokens", []))
    )
