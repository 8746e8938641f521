"""Tokenizers behind one small protocol: a local tokenizer.json, plain bytes, and the training of a byte-level BPE."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalin.data.files import read_limited, write_text
from megalin.errors import ConfigError, DataError

END_OF_DOCUMENT = "<|endoftext|>"
BYTES = "bytes"
_FILE_LIMIT_BYTES = 64 << 20
_VOCABULARY_LIMIT = 1 << 22
_MIN_BPE_VOCABULARY = 257  # every byte, and the end of a document


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        eod_id: the id that ends a document; `encode` never returns it.
        digest: sha256, in hex, of what defines the ids: equal digests give equal ids.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod_id(self) -> int: ...
    @property
    def digest(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added; the text of a special token inside it is ordinary text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are no UTF-8 become U+FFFD."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, special ones included; None where there is no such token."""

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """[vocab_size] int64: bytes that each id decodes to, 0 for special tokens and unused ids."""


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json file, or of plain bytes where `path` is "bytes". Raises DataError."""
    return ByteTokenizer() if path == BYTES else HuggingFaceTokenizer(Path(path))


class ByteTokenizer:
    """One id a byte of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    eod_id = 256
    digest = hashlib.sha256(b"megalin byte tokenizer: 256 bytes, end of document 256").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        end = END_OF_DOCUMENT.encode("utf-8")
        data = b"".join(end if token == self.eod_id else bytes([token]) for token in ids)
        return data.decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        return self.eod_id if token == END_OF_DOCUMENT else None

    def token_bytes(self) -> npt.NDArray[np.int64]:
        counts = np.ones(self.vocab_size, np.int64)
        counts[self.eod_id] = 0
        return counts


class HuggingFaceTokenizer:
    """A tokenizer.json through the `tokenizers` library; padding, truncation and added special tokens are off."""

    def __init__(self, path: Path) -> None:
        """Reads a local file; nothing is downloaded and no code is run.

        Raises:
            DataError: the file is missing, longer than 64 MiB, no tokenizer, lacks `<|endoftext|>`, or has an id of
                2^22 and more.
        """
        data = read_limited(path, limit_bytes=_FILE_LIMIT_BYTES, remedy="give the path of a tokenizer.json")
        self.path = path
        self.digest = hashlib.sha256(data).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise DataError(f"{path}: not a tokenizer.json: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # Else a corpus that merely mentions `<|endoftext|>` would end its document there.
        self._tokenizer.encode_special_tokens = True
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if END_OF_DOCUMENT not in self._vocabulary:
            raise DataError(f"{path}: has no token {END_OF_DOCUMENT}; add it as a special token")
        self.eod_id = self._vocabulary[END_OF_DOCUMENT]
        self.vocab_size = max(self._vocabulary.values()) + 1
        if self.vocab_size > _VOCABULARY_LIMIT:
            raise DataError(f"{path}: expected token ids below {_VOCABULARY_LIMIT}; found {self.vocab_size - 1}")
        self._decoder = json.loads(data).get("decoder")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """As the protocol says; exact, as a byte-level token has one character a byte.

        Raises:
            DataError: the tokenizer is not byte-level, so an id alone does not tell its bytes.
        """
        if not _is_byte_level(self._decoder):
            raise DataError(f"{self.path}: bytes per token need a byte-level tokenizer (decoder ByteLevel)")
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        added = self._tokenizer.get_added_tokens_decoder()
        counts = np.zeros(self.vocab_size, np.int64)
        for token, number in self._vocabulary.items():
            if number in added:
                counts[number] = 0 if added[number].special else len(token.encode("utf-8"))
            else:
                counts[number] = len(token) if alphabet.issuperset(token) else len(token.encode("utf-8"))
        return counts


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in decoder.get("decoders", []))


class BytePairTrainer:
    """Trains a byte-level BPE on a stream of texts: the 256 bytes, `<|endoftext|>` and the merges of most use."""

    def __init__(self, vocab_size: int, *, special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are names beside `<|endoftext|>` that get ids of their own, which no text has.

        Raises:
            ConfigError: `vocab_size` has no room for the bytes and the special tokens, or a name comes twice.
        """
        self._special = [END_OF_DOCUMENT, *special_tokens]
        if len(set(self._special)) < len(self._special) or not all(self._special):
            raise ConfigError(f"special tokens {', '.join(self._special)}: each needs a name, and each only once")
        least = _MIN_BPE_VOCABULARY + len(special_tokens)
        if not least <= vocab_size <= _VOCABULARY_LIMIT:
            raise ConfigError(f"vocab_size = {vocab_size}: a byte-level BPE needs {least} to {_VOCABULARY_LIMIT} ids")
        self._target = vocab_size
        self._tokenizer = tokenizers.Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._tokenizer.decoder = decoders.ByteLevel()

    def train(self, texts: Iterable[str]) -> Self:
        """Learns the merges; text that has no more pairs to merge gives fewer ids than asked for.

        Raises:
            DataError: there is no text at all.
        """
        trainer = trainers.BpeTrainer(
            vocab_size=self._target,
            special_tokens=self._special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        count = 0

        def counted() -> Iterable[str]:
            nonlocal count
            for text in texts:
                count += bool(text)
                yield text

        self._tokenizer.train_from_iterator(counted(), trainer)
        if not count:
            raise DataError("empty corpus: no text to train a tokenizer on; check --input and --json-keys")
        return self

    @property
    def vocab_size(self) -> int:
        """The number of ids so far."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json; a reader sees all of it or none. Raises StorageError."""
        write_text(path, self._tokenizer.to_str(pretty=False))
