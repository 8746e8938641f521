"""The manifest beside a shard, read back: which tokenizer made it, and that it belongs to these tokens."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from megalin.data.shards.indexed_dataset import Shard, manifest_path
from megalin.errors import DataError
from megalin.files import read_input

_LIMIT_BYTES = 16 << 20
_REMEDY = "remove it if the shard was replaced, or write the shard again"


class ShardManifest(NamedTuple):
    """What a manifest says of the tokenizer."""

    digest: str
    """sha256, in hex, of what defines the ids."""
    tokenizer: dict[str, Any]
    """The whole entry, the digest included."""


def read_manifest(shard: Shard) -> ShardManifest | None:
    """The manifest of `shard`, or None where it has none.

    Raises:
        DataError: a file that is no manifest, or one of other tokens.
    """
    path = manifest_path(shard.prefix)
    if not path.exists():
        return None
    data = read_input(path, limit_bytes=_LIMIT_BYTES, remedy=_REMEDY)
    try:
        manifest = json.loads(data)
        tokens, tokenizer = manifest["tokens"], dict(manifest["tokenizer"])
        digest = tokenizer["digest"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path}: not a manifest of a shard; {_REMEDY}") from None
    if tokens != shard.num_tokens:
        raise DataError(f"{path}: expected the {shard.num_tokens} tokens of its shard; found {tokens}; {_REMEDY}")
    return ShardManifest(digest, tokenizer)
