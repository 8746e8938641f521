"""Signatures of texts for deduplication: digests, or MinHash sketches of their words, with LSH bands."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.optional import require

Method = Literal["exact", "minhash"]
_SHINGLE_WORDS = 5
_PERMUTATIONS = 128
_SEED = 42
# A run of letters and digits, or one character of a script without spaces between words.
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_LEAST_CHANCE = 0.9  # that a pair with a similarity at the threshold shares a band

Words = npt.NDArray[np.uint64]


class Scheme(NamedTuple):
    """Comparison of texts: a sketch of `width` bytes, and `bands` hashes; candidates share at least one."""

    method: Method
    threshold: float  # least similarity of duplicates; 1 for "exact"
    bands: int
    rows: int  # MinHash values in a band; 0 for "exact"

    @property
    def width(self) -> int:
        return 16 if self.method == "exact" else _PERMUTATIONS


def scheme(method: Method, threshold: float) -> Scheme:
    """Scheme for a threshold t: the most rows r with 1 - (1 - t^r)^b >= 0.9, where b = floor(128 / r) bands.

    More rows give fewer false candidates.
    """
    if method == "exact":
        return Scheme("exact", 1.0, 1, 0)
    chances = {rows: 1 - (1 - threshold**rows) ** (_PERMUTATIONS // rows) for rows in range(1, 17)}
    rows = max((rows for rows, chance in chances.items() if chance >= _LEAST_CHANCE), default=1)
    return Scheme("minhash", threshold, _PERMUTATIONS // rows, rows)


class Signatures(NamedTuple):
    """Signatures of n texts: bands [n, bands] uint64, and sketches [n, width] uint8."""

    bands: npt.NDArray[np.uint64]
    sketches: npt.NDArray[np.uint8]


def sign(texts: Sequence[str], how: Scheme) -> Signatures:
    """Computes the signatures of `texts`.

    "exact": the first 8 and all 16 bytes of a digest of the text, with each run of white space as one space.
    "minhash": of the set of runs of five words, in lower case; of each of the 128 minima the lowest byte is kept, so
    that a fraction s of equal bytes estimates a Jaccard index of (256 s - 1) / 255. A text of fewer than five words is
    one run; one without words matches no other: its sketch is that of its digest.

    Raises:
        ConfigError: "minhash", and the library rensa is not installed.
    """
    digests = np.frombuffer(b"".join(map(_digest, texts)), np.uint8).reshape(len(texts), 16)
    if how.method == "exact":
        return Signatures(digests.view("<u8")[:, :1].copy(), digests)
    minima = _minima(texts)
    rows = minima[:, : how.bands * how.rows].reshape(len(texts), how.bands, how.rows).astype(np.uint64)
    bands = np.broadcast_to(np.arange(how.bands, dtype=np.uint64), (len(texts), how.bands))
    for row in range(how.rows):
        bands = _mixed(bands * np.uint64(_BASE) + rows[:, :, row])
    return Signatures(bands, minima.astype(np.uint8))


def similarity(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], how: Scheme) -> npt.NDArray[np.float64]:
    """Estimated Jaccard index, 0 to 1, of pairs of sketches [n, width]; "exact": fraction of equal bytes."""
    equal = (one == other).mean(axis=1)
    return equal if how.method == "exact" else np.maximum((256 * equal - 1) / 255, 0.0)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8"), digest_size=16).digest()


def _minima(texts: Sequence[str]) -> npt.NDArray[np.uint32]:
    """MinHash values [n, 128]."""
    hashes = [_shingles(text) for text in texts]
    offsets = np.concatenate(([0], np.cumsum([len(values) for values in hashes]))).astype(np.uint64)
    library = require("rensa", "--method minhash").RMinHash
    matrix: Any = library.digest_matrix_from_flat_token_hashes(np.concatenate(hashes), offsets, _PERMUTATIONS, _SEED)
    return np.array(matrix.to_rows(), np.uint32)


def _shingles(text: str) -> Words:
    """Hashes [m] uint64 of the runs of five words; of all words if they are fewer, of the digest if there are none.

    A run's hash is sum of b_j p^j modulo 2^64 over its bytes from the run's start, mixed.
    """
    words = _WORDS.findall(text.lower())
    if not words:
        return np.frombuffer(_digest(text), "<u8")
    data = np.frombuffer((" ".join(words) + " ").encode("utf-8"), np.uint8)
    ends = np.flatnonzero(data == 32)
    starts = np.concatenate(([0], ends[:-1] + 1))
    run = min(_SHINGLE_WORDS, len(words))
    starts, ends = starts[: len(words) - run + 1], ends[run - 1 :]
    powers = _powers(_BASE, len(data))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum((data + np.uint64(1)) * powers, dtype=np.uint64)))
    return _mixed((sums[ends] - sums[starts]) * _powers(_INVERSE, len(data))[starts])


def _powers(base: int, count: int) -> Words:
    """Powers base^0 .. base^(count - 1) modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(values: Words) -> Words:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `values`."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
