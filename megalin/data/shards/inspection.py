"""Summary of a shard from its checked index, and a full scan of its token ids."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megalin.data.shards.indexed_dataset import Shard, bin_path, idx_path, write_manifest
from megalin.data.shards.manifest import read_manifest
from megalin.data.shards.verification import all_blocks, check_against_manifest, digests_on_open, read_blocks
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.files import open_input

_FIRST_TOKENS = 64
_SCAN_TOKENS = 1 << 22
_DIGEST_BYTES = 1 << 22


class LengthSummary(NamedTuple):
    """Tokens per sequence."""

    min: int
    median: float
    mean: float
    max: int


class ShardSummary(NamedTuple):
    """Summary of one shard."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    lengths: LengthSummary | None  # None for a shard without sequences
    first_tokens: list[int]
    first_text: str | None  # None without a tokenizer
    digest: str  # sha256 of the bytes of .idx and .bin
    label_tokens: int | None  # tokens that count as labels; None without a label mask, as the next two
    label_fraction: float | None  # of all tokens; 0 for a shard without tokens
    label_mask_digest: str | None  # sha256 of the mask's file


def inspect_shard(prefix: str | Path, tokenizer: Tokenizer | None = None) -> ShardSummary:
    """Opens and checks the shard and its label mask, and reads all their bytes for counts and digests.

    Raises:
        DataError: a bad shard, or one of the first tokens is not in the tokenizer.
    """
    with Shard(prefix) as shard:
        mask = shard.label_mask
        label_tokens = None if mask is None else mask.count(0, shard.num_tokens)
        first_tokens = shard.read(0, min(shard.num_tokens, _FIRST_TOKENS)).tolist()
        lengths = None
        if shard.num_sequences:
            lengths = LengthSummary(
                int(shard.lengths.min()),
                float(np.median(shard.lengths)),
                shard.num_tokens / shard.num_sequences,
                int(shard.lengths.max()),
            )
        if tokenizer is not None:
            shard.read_checked(0, len(first_tokens), vocab_size=tokenizer.vocab_size)
        return ShardSummary(
            prefix=str(prefix),
            documents=shard.num_documents,
            sequences=shard.num_sequences,
            tokens=shard.num_tokens,
            dtype=shard.dtype.name,
            lengths=lengths,
            first_tokens=first_tokens,
            first_text=None if tokenizer is None else tokenizer.decode(first_tokens),
            digest=digest(prefix),
            label_tokens=label_tokens,
            label_fraction=None if label_tokens is None else label_tokens / max(shard.num_tokens, 1),
            label_mask_digest=None if mask is None else mask.digest(),
        )


def validate_shard(prefix: str | Path, *, vocab_size: int) -> int:
    """Reads every token id, a few MiB at a time; returns their number.

    Raises:
        DataError: a bad shard, or the first id outside 0 .. vocab_size - 1: file, sequence, offset and id.
    """
    with Shard(prefix, vocab_size=vocab_size) as shard:
        for position in range(0, shard.num_tokens, _SCAN_TOKENS):
            count = min(_SCAN_TOKENS, shard.num_tokens - position)
            shard.read_checked(position, count, vocab_size=vocab_size)
        return shard.num_tokens


def digest_shard(prefix: str | Path) -> Literal["verified", "added"]:
    """Computes the digests of all bytes of the shard; compares them with its manifest's, or adds them there.

    Raises:
        DataError: a bad shard, or one that differs from its manifest: file, block and both digests.
        StorageError: the manifest cannot be written.
    """
    with Shard(prefix) as shard:
        digests = digests_on_open(shard)
        for block, value in read_blocks([shard], all_blocks([shard])).items():
            digests.blocks[block.number] = value
        manifest, mask = read_manifest(shard), shard.label_mask
        if check_against_manifest(shard, digests) == digests:  # not so where that of the mask is missing
            return "verified"
        counts = {
            "documents": shard.num_documents,
            "sequences": shard.num_sequences,
            "tokens": shard.num_tokens,
            "dtype": shard.dtype.name,
            **({} if mask is None else {"label_tokens": mask.count(0, shard.num_tokens)}),
        }
        write_manifest(prefix, {**counts, **({} if manifest is None else manifest.entries), "digests": digests.entry()})
        return "added"


def digest(prefix: str | Path) -> str:
    """sha256, in hex, of the bytes of the .idx followed by those of the .bin. Raises DataError."""
    state = hashlib.sha256()
    for path in (idx_path(prefix), bin_path(prefix)):
        with open_input(path, remedy="give the prefix of a shard, without .bin or .idx") as file:
            while block := file.read(_DIGEST_BYTES):
                state.update(block)
    return state.hexdigest()
