"""Tokenizers behind one protocol: local files of four kinds or plain bytes; training of a byte-level BPE."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megalin.data.config import DataConfig
from megalin.data.tokenizers.formats import END_OF_DOCUMENT as END_OF_DOCUMENT
from megalin.data.tokenizers.formats import (
    FILE_LIMIT_BYTES,
    SENTENCEPIECE_FILE,
    TOKENIZER_FILE,
    VOCABULARY_LIMIT,
    EodToken,
    SentencePieceTokenizer,
    SpecialIds,
    end_of_document,
    holds_ranks,
)
from megalin.data.tokenizers.huggingface import EndOfDocumentError as EndOfDocumentError
from megalin.data.tokenizers.huggingface import HuggingFaceTokenizer as HuggingFaceTokenizer
from megalin.data.tokenizers.huggingface import token_of_id as token_of_id
from megalin.data.tokenizers.tiktoken_ranks import TiktokenTokenizer
from megalin.data.tokenizers.whole_characters import WholeCharacters
from megalin.errors import ConfigError, DataError
from megalin.files import read_input, write_text

BYTES = "bytes"
_BYTES_END = 256
_MIN_BPE_VOCABULARY = 257  # every byte, and the end of a document


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        eod_id: the id that ends a document; `encode` never returns it.
        digest: sha256, in hex, of the definition of the ids: equal digests give equal ids.
        special: special ids of its texts, which `encode` leaves out but for `WithSpecialTokens`.
        altered: parts that change a text before it has ids, for people; else empty: the bytes of ids are the text's.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod_id(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def special(self) -> SpecialIds: ...
    @property
    def altered(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; the text of a special token in it is ordinary text."""

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
    pattern: str = ""  # of tiktoken; empty: that of the published vocabulary
    eod_token: EodToken | None = None  # None: determined by the files
    special_tokens: bool = False  # encode adds special ids around each text, such as BOS

    def __str__(self) -> str:
        return " ".join(self.files) or self.kind

    def load(self) -> Tokenizer:
        """Loads the tokenizer. Raises DataError for an invalid file, ConfigError where a library is missing."""
        return WithSpecialTokens(self._load()) if self.special_tokens else self._load()

    def _load(self) -> Tokenizer:
        match self.kind:
            case "bytes":
                return ByteTokenizer(eod_token=self.eod_token)
            case "sentencepiece":
                return SentencePieceTokenizer(Path(self.files[0]), eod_token=self.eod_token)
            case "tiktoken":
                return TiktokenTokenizer(Path(self.files[0]), pattern=self.pattern, eod_token=self.eod_token)
            case "gpt2":
                return gpt2_tokenizer(*map(Path, self.files), eod_token=self.eod_token)
            case "huggingface":
                return HuggingFaceTokenizer(Path(self.files[0]), eod_token=self.eod_token)


def load_tokenizer(path: str, eod_token: EodToken | None = None, *, special_tokens: bool = False) -> Tokenizer:
    """Loads the tokenizer of a local file or folder, or of plain bytes where `path` is "bytes".

    A name in .model is a SentencePiece model, or a file of ranks if it starts as one (Meta's), a name in .tiktoken a
    file of ranks, any other a tokenizer.json. A folder has tokenizer.json, or else tokenizer.model.

    Args:
        eod_token: text or id of the token that ends a document; None: determined by the files.
        special_tokens: `encode` adds special ids around each text (`WithSpecialTokens`).

    Raises:
        As `TokenizerFiles.load`.
    """
    return tokenizer_files(path)._replace(eod_token=eod_token, special_tokens=special_tokens).load()


def tokenizer_of(config: DataConfig) -> Tokenizer | None:
    """The tokenizer of a run's data; None where the config names none. Raises as `load_tokenizer`."""
    return None if config.tokenizer is None else load_tokenizer(config.tokenizer, config.eod_token)


def tokenizer_files(path: str) -> TokenizerFiles:
    """Kind of a tokenizer's file by its name, as in `load_tokenizer`."""
    if path == BYTES:
        return TokenizerFiles("bytes")
    file = Path(path)
    if file.is_dir() and not (file / TOKENIZER_FILE).exists() and (file / SENTENCEPIECE_FILE).exists():
        file /= SENTENCEPIECE_FILE
    kind: Literal["huggingface", "sentencepiece", "tiktoken"] = "huggingface"
    if file.suffix == ".model":
        kind = "tiktoken" if holds_ranks(file) else "sentencepiece"
    elif file.suffix == ".tiktoken":
        kind = "tiktoken"
    return TokenizerFiles(kind, (str(file),))


class ByteTokenizer:
    """Tokenizer with one id per byte of UTF-8, and 256 for the end of a document, unless another id is given."""

    vocab_size = 257
    eod_id = _BYTES_END
    special = SpecialIds()
    altered = ""
    digest = hashlib.sha256(b"megalin byte tokenizer: 256 bytes, end of document 256").hexdigest()

    def __init__(self, *, eod_token: EodToken | None = None) -> None:
        if eod_token is not None:
            self.eod_id = end_of_document(Path(BYTES), eod_token, self.token_id, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        end = END_OF_DOCUMENT.encode("utf-8")
        data = b"".join(end if token == _BYTES_END else bytes([token]) for token in ids)
        return data.decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        return _BYTES_END if token == END_OF_DOCUMENT else None

    def token_bytes(self) -> npt.NDArray[np.int64]:
        counts = np.ones(self.vocab_size, np.int64)
        counts[_BYTES_END] = 0
        return counts


class WithSpecialTokens:
    """Tokenizer that puts special ids around each text: those of a tokenizer.json's post-processor, as Megatron-LM and
    transformers do; of a SentencePiece model and of Llama's ranks, BOS.

    Attributes:
        plain: the tokenizer without them.
    """

    def __init__(self, plain: Tokenizer) -> None:
        self.plain = plain
        self.vocab_size, self.eod_id, self.digest = plain.vocab_size, plain.eod_id, plain.digest
        self.special, self.altered = plain.special, plain.altered

    def encode(self, text: str) -> list[int]:
        return [*self.special.before, *self.plain.encode(text), *self.special.after]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self.special.before, *ids, *self.special.after] for ids in self.plain.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.plain.decode(ids)

    def token_id(self, token: str) -> int | None:
        return self.plain.token_id(token)

    def token_bytes(self) -> npt.NDArray[np.int64]:
        return self.plain.token_bytes()


def gpt2_tokenizer(vocabulary: Path, merges: Path, *, eod_token: EodToken | None = None) -> HuggingFaceTokenizer:
    """Loads the byte-level BPE of GPT-2's two files, vocab.json and merges.txt. Raises DataError."""
    for path in (vocabulary, merges):
        read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give GPT-2's vocab.json and merges.txt")
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise DataError(f"{vocabulary} and {merges}: not GPT-2's vocabulary and merges: {error}") from error
    tokenizer = _byte_level(model)
    if tokenizer.token_to_id(END_OF_DOCUMENT) is not None:
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return HuggingFaceTokenizer(vocabulary, tokenizer.to_str().encode("utf-8"), eod_token=eod_token)


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
