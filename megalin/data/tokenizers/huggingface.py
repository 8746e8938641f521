"""Tokenizers of a tokenizer.json: the library `tokenizers`, without padding or truncation."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import pre_tokenizers

from megalin.data.tokenizers.altered_text import altered_text
from megalin.data.tokenizers.formats import (
    END_OF_DOCUMENT,
    FILE_LIMIT_BYTES,
    TOKENIZER_FILE,
    VOCABULARY_LIMIT,
    EodToken,
    SpecialIds,
    end_of_document,
    named_tokens,
)
from megalin.data.tokenizers.panics import panics_as_data_errors
from megalin.data.tokenizers.word_cache import WordCache, cuts_as_gpt2
from megalin.errors import DataError
from megalin.files import read_input


class EndOfDocumentError(DataError):
    """A tokenizer.json without a known token that ends a document."""


class HuggingFaceTokenizer:
    """Tokenizer of a tokenizer.json (`tokenizers` library), without padding or truncation.

    A document ends with the first of these that the vocabulary has: the given token; `eos_token` of
    tokenizer_config.json, then of special_tokens_map.json in the same folder; `<|endoftext|>`.
    """

    def __init__(self, path: Path, data: bytes | None = None, *, eod_token: EodToken | None = None) -> None:
        """Reads a local file, that of a folder, or its content from `data`; nothing is downloaded and no code is run.

        Args:
            eod_token: text or id of the token that ends a document.

        Raises:
            DataError: the file is missing, longer than 64 MiB, not a tokenizer, without an end of a document, or has an
                id of 2^22 and more.
        """
        path = path / TOKENIZER_FILE if path.is_dir() else path
        if data is None:
            data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give the path of a tokenizer.json")
        self.path = path
        self.digest, self._data = hashlib.sha256(data).hexdigest(), data
        try:
            with panics_as_data_errors(path):
                self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise DataError(f"{path}: not a tokenizer.json: {error}{_tekken_hint(data)}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # Else a corpus that merely mentions `<|endoftext|>` would end its document there.
        self._tokenizer.encode_special_tokens = True
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.eod_token = self._end_of_document(eod_token)
        self.eod_id = self._vocabulary[self.eod_token]
        self.vocab_size = max(self._vocabulary.values()) + 1
        if self.vocab_size > VOCABULARY_LIMIT:
            raise DataError(f"{path}: expected token ids below {VOCABULARY_LIMIT}; found {self.vocab_size - 1}")
        description = json.loads(data)
        self._decoder = description.get("decoder")
        self.altered = altered_text(description)
        self._cache = WordCache(self._encode_whole) if cuts_as_gpt2(description) else None

    def _end_of_document(self, given: EodToken | None) -> str:
        """Name of the token that ends a document. Raises DataError."""
        if given is not None:
            num_ids = max(self._vocabulary.values(), default=-1) + 1
            number = end_of_document(self.path, given, self._vocabulary.get, num_ids)
            name = self._tokenizer.id_to_token(number)
            if name is None:
                raise DataError(f"{self.path}: has no token of id {number} to end a document; give another one")
            return str(name)
        named = list(named_tokens(self.path.parent, "eos_token"))
        for token in (*named, END_OF_DOCUMENT):
            if token in self._vocabulary:
                return token
        others = f" or {' or '.join(named)}, which its folder names" if named else ""
        raise EndOfDocumentError(
            f"{self.path}: has no token {END_OF_DOCUMENT}{others}; name the token that ends a document, as --eod-token "
            "or data.eod_token"
        )

    @functools.cached_property
    def special(self) -> SpecialIds:
        """Ids that the file's post-processor adds, and BOS: the folder's `bos_token`, or else the first id that it adds
        before a text. Raises DataError for a post-processor that does more than this."""
        texts = ("a", *itertools.islice(self._vocabulary, 1000))
        text = next((text for text in texts if self.encode(text)), "")
        encoding = self._tokenizer.encode(text, add_special_tokens=True)
        marked = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        before = tuple(number for number, _ in itertools.takewhile(lambda each: each[1], marked))
        after = tuple(encoding.ids[len(before) + len(self.encode(text)) :])
        if encoding.ids != [*before, *self.encode(text), *after]:
            raise DataError(f"{self.path}: its post-processor repeats a text; give one that adds tokens around it")
        named = [name for name in named_tokens(self.path.parent, "bos_token") if name in self._vocabulary]
        begin = self._vocabulary[named[0]] if named else next(iter(before), None)
        return SpecialIds(before, after, by_default=bool(before or after), begin=begin)

    @property
    def definition(self) -> str:
        """The parts of the file that decide ids, as JSON in one form, whatever the version of the library that wrote
        the file or reads it."""
        content = json.loads(self._data)
        model = content["model"]
        if "merges" in model:  # written as "a b" or as ["a", "b"]
            model["merges"] = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
        parts = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
        return json.dumps({name: content.get(name) for name in parts}, sort_keys=True)

    def encode(self, text: str) -> list[int]:
        with panics_as_data_errors(self.path):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_whole(texts) if self._cache is None else self._cache.encode_batch(texts)

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        with panics_as_data_errors(self.path):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with panics_as_data_errors(self.path):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """As in the protocol: a byte-level token has one character per byte.

        Raises:
            DataError: the tokenizer is not byte-level, so the bytes of an id are not defined.
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


def token_of_id(path: Path, number: int) -> str | None:
    """Name of the token with an id in a valid tokenizer.json; None if there is none."""
    data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give the path of a tokenizer.json")
    return tokenizers.Tokenizer.from_buffer(data).id_to_token(number) if number >= 0 else None


def _tekken_hint(data: bytes) -> str:
    """End of the error for Mistral's JSON of ranks; empty for other files."""
    tekken = data.lstrip().startswith(b"{") and b'"token_bytes"' in data
    return "; it is Mistral's tekken.json: give the tokenizer.json of the same model" if tekken else ""


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in decoder.get("decoders", []))
