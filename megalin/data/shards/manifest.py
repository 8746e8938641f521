"""Manifest of a shard: its tokenizer, label mask and digests, checked against the shard's token count."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from megalin.data.shards.digests import ShardDigests, parse_digests
from megalin.data.shards.indexed_dataset import Shard, manifest_path
from megalin.data.shards.label_mask import label_mask_path
from megalin.errors import DataError
from megalin.files import read_input

_LIMIT_BYTES = 64 << 20
"""Digests take 73 bytes for each 16 MiB of tokens."""
_REMEDY = "remove it if the shard was replaced, or write the shard again"


class ShardTokenizer(NamedTuple):
    """Tokenizer that made a shard."""

    digest: str
    """sha256, in hex, of its definition."""
    entry: dict[str, Any]
    """Full entry of the manifest, including the digest."""


class ShardManifest(NamedTuple):
    """Entries of a manifest that readers use."""

    tokenizer: ShardTokenizer | None
    """None where it is unknown, as for shards written from token ids."""
    label_tokens: int | None
    """Tokens that count as labels; None: the shard was written without a label mask."""
    digests: ShardDigests | None
    """Digests of .bin, .idx and label mask as they were written; None in a manifest of an earlier version, which may
    also have them without that of the mask."""
    entries: dict[str, Any]
    """All entries, as in the file."""

    @property
    def has_mask(self) -> bool:
        """Whether the shard was written with a label mask."""
        return self.label_tokens is not None or (self.digests is not None and self.digests.mask is not None)


def read_manifest(shard: Shard) -> ShardManifest | None:
    """Reads the manifest of `shard`; None where it has none.

    Raises:
        DataError: not a manifest, one of other tokens, or one of a shard whose label mask is missing.
    """
    path = manifest_path(shard.prefix)
    if not path.exists():
        return None
    data = read_input(path, limit_bytes=_LIMIT_BYTES, remedy=_REMEDY)
    try:
        entries = dict(json.loads(data))
        tokens, tokenizer = entries["tokens"], None
        if "tokenizer" in entries:
            tokenizer = ShardTokenizer(str(entries["tokenizer"]["digest"]), dict(entries["tokenizer"]))
        label_tokens = None if "label_tokens" not in entries else int(entries["label_tokens"])
        digests = None if "digests" not in entries else parse_digests(entries["digests"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path}: not a manifest of a shard; {_REMEDY}") from None
    if tokens != shard.num_tokens:
        raise DataError(f"{path}: expected {shard.num_tokens} tokens, as in its shard; found {tokens}; {_REMEDY}")
    manifest = ShardManifest(tokenizer, label_tokens, digests, entries)
    if manifest.has_mask and shard.label_mask is None:
        raise DataError(
            f"{label_mask_path(shard.prefix)}: missing, but by {path} the shard was written with a label mask, without "
            "which other tokens are learnt; restore it, or remove the manifest too so that every token is a label"
        )
    return manifest
