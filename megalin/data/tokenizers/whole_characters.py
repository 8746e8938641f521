"""Training of a byte-level BPE in which given characters are single tokens: merges of their bytes before all others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megalin.data.tokenizers.formats import FILE_LIMIT_BYTES
from megalin.errors import DataError
from megalin.files import read_input

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_FIRST_SYMBOL = 0xF0000
"""Code point of the first symbol, in a private-use plane: byte-level text has none of them."""


class WholeCharacters:
    """Characters that become single tokens of a byte-level BPE, wherever they occur in a text.

    A character of the bytes b1 b2 b3 gets the merges b1 + b2 and b1b2 + b3, with ranks before all learned merges; its
    prefix b1b2 becomes a token too. No two such merges compete for a byte, since a lead byte starts one character and
    its merges go from there to the right. So they apply to each occurrence, and learned merges join whole characters.
    Other characters remain bytes, a prefix that they share, and learned merges of these.

    The other merges are learned from text in which characters and prefixes are one symbol each, as these first merges
    leave it: the learned ones are those of a BPE with the characters in its alphabet.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        """Takes the characters of several bytes; the ASCII characters are tokens of any byte-level BPE."""
        self.characters = sorted({character for character in characters if not character.isascii()})
        spelled = [_spell(character) for character in self.characters]
        pieces = {text[:length] for text in spelled for length in range(2, len(text) + 1)}
        self._pieces = sorted(pieces, key=lambda piece: (len(piece), piece))
        self._symbols = {piece: chr(_FIRST_SYMBOL + index) for index, piece in enumerate(self._pieces)}

    @property
    def num_tokens(self) -> int:
        """Tokens beyond the 256 bytes: the characters and their prefixes of several bytes."""
        return len(self._pieces)

    def train(self, texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str]) -> models.BPE:
        """Learns the other merges. Ids: special tokens, bytes, prefixes and characters, learned tokens."""
        draft = tokenizers.Tokenizer(models.BPE())
        draft.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # byte-level text has no white space of its own
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), *self._symbols.values()],
            show_progress=False,
        )
        table = _SymbolTable(self._symbols)
        words = (
            " ".join(text[first:last].translate(table) for _, (first, last) in _WORDS.pre_tokenize_str(text))
            for text in texts
        )
        draft.train_from_iterator(words, trainer)
        learned = json.loads(draft.to_str())["model"]
        spelling = str.maketrans({symbol: piece for piece, symbol in self._symbols.items()})
        vocabulary = {token.translate(spelling): number for token, number in learned["vocab"].items()}
        merges = [(piece[:-1], piece[-1]) for piece in self._pieces]  # shorter pieces first
        merges += [(first.translate(spelling), second.translate(spelling)) for first, second in learned["merges"]]
        return models.BPE(vocab=vocabulary, merges=merges)


def read_characters(path: Path) -> str:
    """The characters of a UTF-8 file, however they are arranged, for `WholeCharacters`.

    Raises:
        DataError: the file is missing, longer than 64 MiB, not UTF-8, empty, or has ASCII characters alone.
    """
    data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give the path of a text file of characters")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error.reason} at byte {error.start}; convert the file to UTF-8") from None
    if text.isascii():
        found = "is empty" if not text.strip() else "has ASCII characters alone, which are single tokens in any case"
        raise DataError(f"{path}: {found}; write the characters to add into it, one a line or all together")
    return text


class _SymbolTable(dict[int, str]):
    """Table of `str.translate`, filled on use: a character's byte-level text, its longest piece as one symbol."""

    def __init__(self, symbols: dict[str, str]) -> None:
        super().__init__()
        self._symbols = symbols

    def __missing__(self, code_point: int) -> str:
        spelled = _spell(chr(code_point))
        for length in range(len(spelled), 1, -1):
            if (symbol := self._symbols.get(spelled[:length])) is not None:
                spelled = symbol + spelled[length:]
                break
        self[code_point] = spelled
        return spelled


def _spell(character: str) -> str:
    """The byte-level text of a character: one printable character a byte."""
    ((spelled, _),) = _BYTES.pre_tokenize_str(character)
    return spelled
