"""Files of tokenizers: their limits, the token that ends a document, and SentencePiece models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.errors import DataError
from megalin.files import open_input, read_input
from megalin.optional import require

END_OF_DOCUMENT = "<|endoftext|>"
FILE_LIMIT_BYTES = 64 << 20
VOCABULARY_LIMIT = 1 << 22
TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZER_SETTINGS = "tokenizer_config.json"
_SETTINGS_FILES = (TOKENIZER_SETTINGS, "special_tokens_map.json")
_FIRST_RANK = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
_FIRST_BYTES = 256

EodToken = str | int
"""The token that ends a document: its text, or its id as a number or in decimal digits."""


def end_of_document(path: Path, given: EodToken, token_id: Callable[[str], int | None], num_ids: int) -> int:
    """Id of the given token of a tokenizer with ids below `num_ids`.

    Raises:
        DataError: no token of this text or id; names `path`, the tokenizer's file.
    """
    if isinstance(given, int) or (given.isascii() and given.isdecimal()):
        if 0 <= int(given) < num_ids:
            return int(given)
        raise DataError(f"{path}: has no id {given} to end a document; give one from 0 to {num_ids - 1}")
    found = token_id(given)
    if found is None:
        raise DataError(f"{path}: has no token {given!r} to end a document; give one of its tokens, or an id")
    return found


def holds_ranks(path: Path) -> bool:
    """True for a file that starts as tiktoken's ranks do, whatever its name, such as Meta's tokenizer.model."""
    if not path.is_file():
        return False
    with open_input(path, remedy="give the path of a tokenizer") as file:
        return _FIRST_RANK.match(file.read(_FIRST_BYTES)) is not None


class SpecialIds(NamedTuple):
    """Special ids of a tokenizer's texts."""

    before: tuple[int, ...] = ()
    """Ids that precede a text with special tokens, such as BOS."""
    after: tuple[int, ...] = ()
    """Ids that follow it."""
    by_default: bool = False
    """Whether a text has them by default, as that of a tokenizer.json whose post-processor adds them."""
    begin: int | None = None
    """Id of BOS, also of a tokenizer that does not add it by itself; None where the files name none."""


def named_tokens(folder: Path, key: str) -> Iterator[str]:
    """Yields `key` (eos_token, bos_token) of the settings of a Hugging Face tokenizer in `folder`.

    Raises:
        DataError: a bad file.
    """
    for token in _settings(folder, key):
        content = token.get("content") if isinstance(token, dict) else token  # an added token, or its name
        if isinstance(content, str):
            yield content


def _settings(folder: Path, key: str) -> Iterator[Any]:
    """Yields the values of a key in the settings of a tokenizer's folder. Raises DataError for a bad file."""
    for name in _SETTINGS_FILES:
        path = folder / name
        if not path.exists():
            continue
        data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="remove it, or download it again")
        try:
            yield json.loads(data)[key]
        except KeyError:
            continue
        except (ValueError, TypeError, RecursionError):
            raise DataError(f"{path}: not a JSON object; remove it, or download it again") from None


class SentencePieceTokenizer:
    """SentencePiece model; a document ends with the given piece, or else the end of sentence, or `<|endoftext|>`."""

    altered = "the model's normalization"

    def __init__(self, path: Path, *, eod_token: EodToken | None = None) -> None:
        """Reads a local .model file.

        Raises:
            ConfigError: the library sentencepiece is not installed.
            DataError: the file is missing, longer than 64 MiB, not a model, or has no end of document.
        """
        library = require("sentencepiece", f"{path}: a SentencePiece model")
        data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give the path of a SentencePiece .model")
        self.path = path
        self.digest = hashlib.sha256(data).hexdigest()
        self._processor = library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            hint = "; it is a file of ranks: use --tokenizer-type TikTokenizer" if holds_ranks(path) else ""
            raise DataError(f"{path}: not a SentencePiece model: {error}{hint}") from None
        self.vocab_size = int(self._processor.vocab_size())
        eod = self._processor.eos_id() if self._processor.eos_id() >= 0 else self.token_id(END_OF_DOCUMENT)
        if eod_token is not None:
            eod = end_of_document(path, eod_token, self.token_id, self.vocab_size)
        if eod is None:
            raise DataError(f"{path}: has neither an end of sentence nor {END_OF_DOCUMENT}; train it with one of them")
        self.eod_id = int(eod)
        begin = int(self._processor.bos_id())
        if begin < 0:
            self.special = SpecialIds()
        elif next(_settings(path.parent, "add_bos_token"), False) is True:
            self.special = SpecialIds((begin,), by_default=True, begin=begin)
        else:
            self.special = SpecialIds((begin,))

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: the processes are the parallelism.
        return list(self._processor.encode(list(texts), num_threads=1)) if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        found = int(self._processor.piece_to_id(token))
        return found if self._processor.id_to_piece(found) == token else None

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Raises DataError: the model normalizes text before splitting it, so the bytes of an id are not defined."""
        raise DataError(f"{self.path}: bytes per token need a byte-level tokenizer, which a SentencePiece model is not")
