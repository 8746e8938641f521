"""Tokenizers of SentencePiece models and tiktoken files: local files only, each library imported on use."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.tokenizers.panics import panics_as_data_errors
from megalin.errors import ConfigError, DataError
from megalin.files import read_input
from megalin.optional import require

END_OF_DOCUMENT = "<|endoftext|>"
FILE_LIMIT_BYTES = 64 << 20
VOCABULARY_LIMIT = 1 << 22
TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
_LONG_RUN = "it takes no run of a million spaces: leave such texts out, as --max-document-bytes 900000 does"
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class TiktokenPattern(NamedTuple):
    """Pre-tokenization pattern of a published vocabulary, with its size and end of document."""

    expression: str
    num_ranks: int  # of the vocabulary published with the pattern
    eod_id: int  # of <|endoftext|> there


# Published with each vocabulary: with another pattern, the same ranks give other ids.
TIKTOKEN_PATTERNS = {
    "gpt2": TiktokenPattern(
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""", 50256, 50256
    ),
    "cl100k": TiktokenPattern(
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
        r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
        100256,
        100257,
    ),
    "o200k": TiktokenPattern(
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
        r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
        r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
        199998,
        199999,
    ),
}


def named_end_tokens(folder: Path) -> Iterator[str]:
    """Yields `eos_token` of the settings of a Hugging Face tokenizer in `folder`. Raises DataError for a bad file."""
    for name in _SETTINGS_FILES:
        path = folder / name
        if not path.exists():
            continue
        data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="remove it, or download it again")
        try:
            token = json.loads(data)["eos_token"]
        except KeyError:
            continue
        except (ValueError, TypeError, RecursionError):
            raise DataError(f"{path}: not a JSON object; remove it, or download it again") from None
        content = token.get("content") if isinstance(token, dict) else token  # an added token, or its name
        if isinstance(content, str):
            yield content


class SentencePieceTokenizer:
    """SentencePiece model; a document ends with the given piece, or else the end of sentence, or `<|endoftext|>`."""

    def __init__(self, path: Path, *, eod_token: str | None = None) -> None:
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
            raise DataError(f"{path}: not a SentencePiece model: {error}") from None
        self.vocab_size = int(self._processor.vocab_size())
        eod = self._processor.eos_id() if self._processor.eos_id() >= 0 else self.token_id(END_OF_DOCUMENT)
        if eod_token is not None:
            eod = self.token_id(eod_token)
            if eod is None:
                raise DataError(f"{path}: has no piece {eod_token!r} to end a document; give one of its pieces")
        if eod is None:
            raise DataError(f"{path}: has neither an end of sentence nor {END_OF_DOCUMENT}; train it with one of them")
        self.eod_id = int(eod)

    @property
    def definition(self) -> str:
        return hashlib.sha256(f"{self.digest} {self.eod_id}".encode()).hexdigest()

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


class TiktokenTokenizer:
    """Tiktoken's file of ranks (a line: base64 of the bytes, and the rank) with its pattern."""

    def __init__(self, path: Path, *, pattern: str = "") -> None:
        """Reads a local .tiktoken file; an empty `pattern` means that of the published vocabulary with as many ranks.

        Raises:
            ConfigError: the library tiktoken is not installed; the pattern is unknown, or not given by the ranks.
            DataError: the file is missing, longer than 64 MiB, or not ranks of bytes from 0 on.
        """
        library = require("tiktoken", f"{path}: a file of tiktoken's ranks")
        data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give the path of a .tiktoken file of ranks")
        self.path = path
        ranks = _read_ranks(path, data)
        name = pattern or next((name for name, known in TIKTOKEN_PATTERNS.items() if known.num_ranks == len(ranks)), "")
        if name not in TIKTOKEN_PATTERNS:
            raise ConfigError(
                f"{path}: {len(ranks)} ranks and the pattern {name!r} match no known vocabulary; give "
                f"--tiktoken-pattern {', '.join(TIKTOKEN_PATTERNS)}"
            )
        known = TIKTOKEN_PATTERNS[name]
        self.eod_id = known.eod_id if known.num_ranks == len(ranks) else len(ranks)
        self.vocab_size = self.eod_id + 1
        self.digest = hashlib.sha256(f"tiktoken {name}\n".encode() + data).hexdigest()
        self._ranks = ranks
        self._encoding: Any = library.Encoding(
            f"{path.name} {name}",
            pat_str=known.expression,
            mergeable_ranks=ranks,
            special_tokens={END_OF_DOCUMENT: self.eod_id},
        )

    @property
    def definition(self) -> str:
        return hashlib.sha256(f"{self.digest} {self.eod_id}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        with panics_as_data_errors(self.path, remedy=_LONG_RUN):
            return list(self._encoding.encode_ordinary(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with panics_as_data_errors(self.path, remedy=_LONG_RUN):
            return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if token < len(self._ranks) or token == self.eod_id]
        return str(self._encoding.decode(known, errors="replace"))

    def token_id(self, token: str) -> int | None:
        return self.eod_id if token == END_OF_DOCUMENT else self._ranks.get(token.encode("utf-8"))

    def token_bytes(self) -> npt.NDArray[np.int64]:
        counts = np.zeros(self.vocab_size, np.int64)
        for token, rank in self._ranks.items():
            counts[rank] = len(token)
        return counts


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{path}:{number}: expected a token in base64 and its rank; found {line[:80]!r}") from None
    complete = sorted(ranks.values()) == list(range(len(ranks))) and len(ranks) < VOCABULARY_LIMIT
    if not complete or any(bytes([byte]) not in ranks for byte in range(256)):
        raise DataError(
            f"{path}: expected every byte and each rank from 0 to {len(ranks) - 1} once; is the file truncated?"
        )
    return ranks
