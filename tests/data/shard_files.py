"""Shards written by hand with struct, independent of the code under test."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path


def index_bytes(
    lengths: Sequence[int],
    documents: Sequence[int],
    *,
    code: int = 8,
    itemsize: int = 2,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    num_sequences: int | None = None,
    num_entries: int | None = None,
    pointers: Sequence[int] | None = None,
) -> bytes:
    """The .idx of spec section 2.1; the keywords plant faults that a valid file does not have."""
    if pointers is None:
        pointers = [sum(lengths[:k]) * itemsize for k in range(len(lengths))]
    return b"".join(
        [
            magic,
            struct.pack("<Q", version),
            struct.pack("<B", code),
            struct.pack("<Q", len(lengths) if num_sequences is None else num_sequences),
            struct.pack("<Q", len(documents) if num_entries is None else num_entries),
            struct.pack(f"<{len(lengths)}i", *lengths),
            struct.pack(f"<{len(pointers)}q", *pointers),
            struct.pack(f"<{len(documents)}q", *documents),
        ]
    )


def write_by_hand(prefix: Path, sequences: Sequence[Sequence[int]], documents: Sequence[int] | None = None) -> Path:
    """Writes a uint16 shard of `sequences`, one per document unless `documents` is given; returns the prefix."""
    if documents is None:
        documents = range(len(sequences) + 1)
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    Path(f"{prefix}.idx").write_bytes(index_bytes([len(s) for s in sequences], list(documents)))
    return prefix


def mask_bytes(bits: Sequence[bool]) -> bytes:
    """The label mask `PREFIX.mask.bin` of a shard of len(bits) tokens."""
    packed = bytearray(-(-len(bits) // 8))
    for token, bit in enumerate(bits):
        packed[token // 8] |= bool(bit) << token % 8
    return b"MGLMASK1" + struct.pack("<Q", len(bits)) + bytes(packed)


def assert_mask_is_sealed(prefix: Path | str) -> None:
    """The manifest of the shard has the sha256 of its label mask's bytes on the disk."""
    sealed = json.loads(Path(f"{prefix}.manifest.json").read_text())["digests"]["mask"]
    assert sealed == hashlib.sha256(Path(f"{prefix}.mask.bin").read_bytes()).hexdigest()
