"""Manifest of a shard: its tokenizer and its label mask, checked against the shard's token count."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from megalin.data.shards.indexed_dataset import Shard, manifest_path
from megalin.errors import DataError
from megalin.files import read_input

_LIMIT_BYTES = 16 << 20
_REMEDY = "remove it if the shard was replaced, or write the shard again"


class ShardManifest(NamedTuple):
    """Entries of a manifest that readers use."""

    digest: str
    """sha256, in hex, of the tokenizer's definition."""
    tokenizer: dict[str, Any]
    """Full entry, including the digest."""
    label_tokens: int | None
    """Tokens that count as labels; None: the shard was written without a label mask."""


def read_manifest(shard: Shard) -> ShardManifest | None:
    """Reads the manifest of `shard`; None where it has none.

    Raises:
        DataError: not a manifest, or one of other tokens.
    """
    path = manifest_path(shard.prefix)
    if not path.exists():
        return None
    data = read_input(path, limit_bytes=_LIMIT_BYTES, remedy=_REMEDY)
    try:
        manifest = json.loads(data)
        tokens, tokenizer = manifest["tokens"], dict(manifest["tokenizer"])
        digest = tokenizer["digest"]
        label_tokens = None if "label_tokens" not in manifest else int(manifest["label_tokens"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path}: not a manifest of a shard; {_REMEDY}") from None
    if tokens != shard.num_tokens:
        raise DataError(f"{path}: expected {shard.num_tokens} tokens, as in its shard; found {tokens}; {_REMEDY}")
    return ShardManifest(digest, tokenizer, label_tokens)
