"""Tokenizers behind one protocol: local files of four kinds or plain bytes; training of a byte-level BPE."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalin.data.tokenizers.formats import END_OF_DOCUMENT as END_OF_DOCUMENT
from megalin.data.tokenizers.formats import (
    FILE_LIMIT_BYTES,
    SENTENCEPIECE_FILE,
    TOKENIZER_FILE,
    VOCABULARY_LIMIT,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    named_end_tokens,
)
from megalin.data.tokenizers.panics import panics_as_data_errors
from megalin.data.tokenizers.whole_characters import WholeCharacters
from megalin.data.tokenizers.word_cache import WordCache, cuts_as_gpt2
from megalin.errors import ConfigError, DataError
from megalin.files import read_input, write_text

BYTES = "bytes"
_MIN_BPE_VOCABULARY = 257  # every byte, and the end of a document


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        eod_id: the id that ends a document; `encode` never returns it.
        digest: sha256, in hex, of the definition of the ids: equal digests give equal ids.
        definition: the same of the definition's content alone, as vocabulary, special tokens and normalizer: equal for
            files that differ in their form only.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod_id(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def definition(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens unless it was loaded so; the text of a special token in it is
        ordinary text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, as `encode`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, including special tokens; bytes that are not UTF-8 become U+FFFD."""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name, also of a special one; None where there is no such token."""

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """[vocab_size] int64: number of bytes that each id decodes to, 0 for special tokens and unused ids."""


TokenizerKind = Literal["bytes", "huggingface", "gpt2", "sentencepiece", "tiktoken"]


class TokenizerFiles(NamedTuple):
    """Kind and local files of a tokenizer."""

    kind: TokenizerKind
    files: tuple[str, ...] = ()  # gpt2: vocab.json and merges.txt; bytes: none; else one, or its folder
    pattern: str = ""  # of tiktoken; empty: determined by the number of ranks
    eod_token: str | None = None  # of huggingface and sentencepiece; None: determined by the files
    special_tokens: bool = False  # of huggingface: encode adds the ids of the file's post-processor

    def __str__(self) -> str:
        return " ".join(self.files) or self.kind

    def load(self) -> Tokenizer:
        """Loads the tokenizer. Raises DataError for an invalid file, ConfigError where a library is missing."""
        match self.kind:
            case "bytes":
                return ByteTokenizer()
            case "sentencepiece":
                return SentencePieceTokenizer(Path(self.files[0]), eod_token=self.eod_token)
            case "tiktoken":
                return TiktokenTokenizer(Path(self.files[0]), pattern=self.pattern)
            case "gpt2":
                return gpt2_tokenizer(*map(Path, self.files))
            case "huggingface":
                file, eod_token = Path(self.files[0]), self.eod_token
                return HuggingFaceTokenizer(file, eod_token=eod_token, special_tokens=self.special_tokens)


def load_tokenizer(path: str, eod_token: str | None = None, *, special_tokens: bool = False) -> Tokenizer:
    """Loads the tokenizer of a local file or folder, or of plain bytes where `path` is "bytes".

    A name in .model is a SentencePiece model, one in .tiktoken a file of ranks, any other a tokenizer.json. A folder
    has tokenizer.json, or else tokenizer.model.

    Args:
        eod_token: name of the token that ends a document; None: determined by the files.
        special_tokens: `encode` adds the ids of a tokenizer.json's post-processor, such as BOS.

    Raises:
        As `TokenizerFiles.load`.
    """
    files = tokenizer_files(path)
    if eod_token is not None and files.kind not in ("huggingface", "sentencepiece"):
        raise ConfigError(
            f"{path}: its end of document is {END_OF_DOCUMENT}, not {eod_token!r}; only a tokenizer.json or a "
            "SentencePiece model takes data.eod_token"
        )
    return files._replace(eod_token=eod_token, special_tokens=special_tokens).load()


def tokenizer_files(path: str) -> TokenizerFiles:
    """Kind of a tokenizer's file by its name, as in `load_tokenizer`."""
    if path == BYTES:
        return TokenizerFiles("bytes")
    file = Path(path)
    if file.is_dir() and not (file / TOKENIZER_FILE).exists() and (file / SENTENCEPIECE_FILE).exists():
        file /= SENTENCEPIECE_FILE
    kind: Literal["huggingface", "sentencepiece", "tiktoken"]
    kind = "sentencepiece" if file.suffix == ".model" else "tiktoken" if file.suffix == ".tiktoken" else "huggingface"
    return TokenizerFiles(kind, (str(file),))


class ByteTokenizer:
    """Tokenizer with one id per byte of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    eod_id = 256
    digest = hashlib.sha256(b"megalin byte tokenizer: 256 bytes, end of document 256").hexdigest()
    definition = digest

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


class EndOfDocumentError(DataError):
    """A tokenizer.json without a known token that ends a document."""


class HuggingFaceTokenizer:
    """Tokenizer of a tokenizer.json (`tokenizers` library), without padding or truncation.

    A document ends with the first of these that the vocabulary has: the given token; `eos_token` of
    tokenizer_config.json, then of special_tokens_map.json in the same folder; `<|endoftext|>`.
    """

    def __init__(
        self, path: Path, data: bytes | None = None, *, eod_token: str | None = None, special_tokens: bool = False
    ) -> None:
        """Reads a local file, that of a folder, or its content from `data`; nothing is downloaded and no code is run.

        Args:
            eod_token: name of the token that ends a document.
            special_tokens: `encode` adds the ids of the file's post-processor, such as BOS, as Megatron-LM does.

        Raises:
            DataError: the file is missing, longer than 64 MiB, not a tokenizer, without an end of a document, or has an
                id of 2^22 and more.
        """
        path = path / TOKENIZER_FILE if path.is_dir() else path
        if data is None:
            data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give the path of a tokenizer.json")
        self.path = path
        self.digest = hashlib.sha256(data).hexdigest()
        try:
            with panics_as_data_errors(path):
                self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise DataError(f"{path}: not a tokenizer.json: {error}") from error
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
        self._special_tokens = special_tokens
        cached = cuts_as_gpt2(description) and not special_tokens
        self._cache = WordCache(self._encode_whole) if cached else None

    def _end_of_document(self, given: str | None) -> str:
        """Name of the token that ends a document. Raises DataError."""
        if given is not None:
            if given not in self._vocabulary:
                raise DataError(f"{self.path}: has no token {given!r} to end a document; give one of its tokens")
            return given
        named = list(named_end_tokens(self.path.parent))
        for token in (*named, END_OF_DOCUMENT):
            if token in self._vocabulary:
                return token
        others = f" or {' or '.join(named)}, which its folder names" if named else ""
        raise EndOfDocumentError(
            f"{self.path}: has no token {END_OF_DOCUMENT}{others}; name the token that ends a document, as --eod-token "
            "or data.eod_token"
        )

    @property
    def definition(self) -> str:
        content = json.dumps([json.loads(self._tokenizer.to_str()), self.eod_id], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def leading_special_ids(self) -> list[int]:
        """The ids that the file's post-processor puts before a text, such as BOS; empty without such."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [number for number, _ in itertools.takewhile(lambda each: each[1], marked)]

    def encode(self, text: str) -> list[int]:
        with panics_as_data_errors(self.path):
            return list(self._tokenizer.encode(text, add_special_tokens=self._special_tokens).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_whole(texts) if self._cache is None else self._cache.encode_batch(texts)

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        with panics_as_data_errors(self.path):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with panics_as_data_errors(self.path):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """As in the protocol; exact, because a byte-level token has one character per byte.

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


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in decoder.get("decoders", []))


def gpt2_tokenizer(vocabulary: Path, merges: Path) -> HuggingFaceTokenizer:
    """Loads the byte-level BPE of GPT-2's two files, vocab.json and merges.txt. Raises DataError."""
    for path in (vocabulary, merges):
        read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give GPT-2's vocab.json and merges.txt")
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # as above
        raise DataError(f"{vocabulary} and {merges}: not GPT-2's vocabulary and merges: {error}") from error
    tokenizer = _byte_level(model)
    if tokenizer.token_to_id(END_OF_DOCUMENT) is not None:
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return HuggingFaceTokenizer(vocabulary, tokenizer.to_str().encode("utf-8"))


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class BytePairTrainer:
    """Trains a byte-level BPE on texts: the 256 bytes, `<|endoftext|>`, characters that are single tokens in any case,
    and the most frequent merges."""

    def __init__(self, vocab_size: int, *, special_tokens: Sequence[str] = (), characters: Iterable[str] = ()) -> None:
        """Creates the trainer.

        Args:
            special_tokens: besides `<|endoftext|>`; they get ids that no text is encoded to.
            characters: characters that become single tokens (`WholeCharacters`).

        Raises:
            ConfigError: `vocab_size` is too small for the bytes, the special tokens and the characters, or a name is
                given twice.
        """
        self._special = [END_OF_DOCUMENT, *special_tokens]
        if len(set(self._special)) < len(self._special) or not all(self._special):
            raise ConfigError(f"special tokens {', '.join(self._special)}: names must not be empty or repeated")
        self._whole = WholeCharacters(characters)
        least = _MIN_BPE_VOCABULARY + len(special_tokens) + self._whole.num_tokens
        if not least <= vocab_size <= VOCABULARY_LIMIT:
            added = ""
            if self._whole.characters:
                prefixes = self._whole.num_tokens - len(self._whole.characters)
                added = f" with {len(self._whole.characters)} added characters and their prefixes ({prefixes})"
            raise ConfigError(
                f"vocab_size = {vocab_size}: a byte-level BPE{added} needs {least} to {VOCABULARY_LIMIT} ids"
            )
        self._target = vocab_size
        self._tokenizer = _byte_level(models.BPE())

    def train(self, texts: Iterable[str]) -> Self:
        """Learns the merges; if the text has no more pairs to merge, there are fewer ids than requested.

        Raises:
            DataError: there is no text.
        """
        count = 0

        def counted() -> Iterable[str]:
            nonlocal count
            for text in texts:
                count += bool(text)
                yield text

        if self._whole.characters:
            model = self._whole.train(counted(), vocab_size=self._target, special_tokens=self._special)
            self._tokenizer = _byte_level(model)
            self._tokenizer.add_special_tokens(self._special)
        else:
            trainer = trainers.BpeTrainer(
                vocab_size=self._target,
                special_tokens=self._special,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            self._tokenizer.train_from_iterator(counted(), trainer)
        if not count:
            raise DataError("empty corpus: no text to train a tokenizer on; check --input and --json-keys")
        return self

    @property
    def vocab_size(self) -> int:
        """Current number of ids."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json atomically. Raises StorageError."""
        write_text(path, self._tokenizer.to_str(pretty=False))
