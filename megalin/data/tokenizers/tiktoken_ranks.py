"""Tokenizers of tiktoken's files of ranks: the published vocabularies, and others with a given pattern and end."""

from __future__ import annotations

import base64
import binascii
import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalin.data.tokenizers.formats import (
    END_OF_DOCUMENT,
    FILE_LIMIT_BYTES,
    VOCABULARY_LIMIT,
    EodToken,
    SpecialIds,
    end_of_document,
)
from megalin.data.tokenizers.panics import panics_as_data_errors
from megalin.data.tokenizers.rank_families import PATTERNS, RankFamily, family_of
from megalin.errors import ConfigError, DataError
from megalin.files import read_input
from megalin.optional import require

_LONG_RUN = "it takes no run of a million spaces: leave such texts out, as --max-document-bytes 900000 does"


class TiktokenTokenizer:
    """Tiktoken's file of ranks (a line: base64 of the bytes, and the rank) with its pattern and special tokens."""

    def __init__(self, path: Path, *, pattern: str = "", eod_token: EodToken | None = None) -> None:
        """Reads a local file of ranks. Those of `rank_families.FAMILIES` have their pattern and special tokens.

        Args:
            pattern: key of PATTERNS; empty: that of the family.
            eod_token: token that ends a document; None: that of the family.

        Raises:
            ConfigError: the library tiktoken is not installed; the pattern is unknown; ranks of no known family without
                a pattern or an end of a document.
            DataError: the file is missing, longer than 64 MiB, or not ranks of bytes from 0 on; no such end.
        """
        library = require("tiktoken", f"{path}: a file of tiktoken's ranks")
        data = read_input(path, limit_bytes=FILE_LIMIT_BYTES, remedy="give the path of a .tiktoken file of ranks")
        self.path = path
        self._ranks = _read_ranks(path, data)
        family = family_of(self._ranks)
        special = {} if family is None else dict(family.special_tokens)
        _check_ranks(path, self._ranks, special)
        name = pattern or (family.pattern if family is not None else "")
        _check_known(path, len(self._ranks), name, family, eod_token)
        self.eod_id = self._end(special, family, eod_token)
        if self.eod_id not in {*special.values(), *self._ranks.values()}:
            special[END_OF_DOCUMENT] = self.eod_id
        self.vocab_size = max(*self._ranks.values(), *special.values(), self.eod_id) + 1
        self.digest = hashlib.sha256(f"tiktoken {name}\n".encode() + data).hexdigest()
        self._special = special
        self.special = SpecialIds(() if family is None or family.begin is None else (special[family.begin],))
        self.altered = "" if family is None or family.normal_form is None else f"the normal form {family.normal_form}"
        self._normal_form = None if family is None else family.normal_form
        self._known = frozenset((*self._ranks.values(), *special.values()))
        self._encoding: Any = library.Encoding(
            f"{path.name} {name}",
            pat_str=PATTERNS[name],
            mergeable_ranks=self._ranks,
            special_tokens=special,
        )

    def _end(self, special: dict[str, int], family: RankFamily | None, given: EodToken | None) -> int:
        """The id that ends a document. Raises DataError for a given one that there is not."""
        if given is None:
            assert family is not None, self.path
            return special[family.end]
        known = {*self._ranks.values(), *special.values()}
        num_ids = VOCABULARY_LIMIT if family is None else max(known) + 1
        names = {token.decode(errors="replace"): rank for token, rank in self._ranks.items()} | special
        found = end_of_document(self.path, given, names.get, num_ids)
        if family is not None and found not in known:
            raise DataError(f"{self.path}: {family.name} has no token of id {found} to end a document; give another")
        return found

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._normal_form is not None:
            texts = [unicodedata.normalize(self._normal_form, text) for text in texts]
        with panics_as_data_errors(self.path, remedy=_LONG_RUN):
            return [list(self._encoding.encode_ordinary(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([token for token in ids if token in self._known], errors="replace"))

    def token_id(self, token: str) -> int | None:
        return self._special.get(token, self._ranks.get(token.encode("utf-8")))

    def token_bytes(self) -> npt.NDArray[np.int64]:
        counts = np.zeros(self.vocab_size, np.int64)
        for token, rank in self._ranks.items():
            counts[rank] = len(token)
        return counts


def _check_known(path: Path, num_ranks: int, pattern: str, family: RankFamily | None, end: EodToken | None) -> None:
    """Raises ConfigError for an unknown pattern, and for ranks of no known family whose pattern or end is not given."""
    if pattern and pattern not in PATTERNS:
        raise ConfigError(f"{path}: pattern {pattern!r}: no such pattern; give one of {', '.join(PATTERNS)}")
    missing = [] if pattern else [f"--tiktoken-pattern {', '.join(PATTERNS)}"]
    if family is None and end is None:
        missing.append(
            f"--eod-token ID (data.eod_token), the id that ends a document, as {num_ranks}, the first after the ranks"
        )
    if missing:
        raise ConfigError(f"{path}: {num_ranks} ranks of no known vocabulary; give {' and '.join(missing)}")


def _read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{path}:{number}: expected a token in base64 and its rank; found {line[:80]!r}") from None
    return ranks


def _check_ranks(path: Path, ranks: Mapping[bytes, int], special: Mapping[str, int]) -> None:
    """Raises DataError unless each byte has a rank and each number from 0 on is one, or the id of a special token."""
    numbers = sorted(ranks.values())
    last, taken = max(numbers, default=-1), set(special.values())
    expected = [number for number in range(min(last, VOCABULARY_LIMIT) + 1) if number not in taken]
    if numbers != expected or any(bytes([byte]) not in ranks for byte in range(256)):
        raise DataError(
            f"{path}: expected every byte and each rank from 0 to {len(ranks) - 1} once; is the file truncated?"
        )
