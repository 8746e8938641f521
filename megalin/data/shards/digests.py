"""Digests of a shard: sha256 of each 16 MiB block of its .bin, of its whole .idx and of its label mask, computed as
they are written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

BLOCK_BYTES = 16 << 20
"""Bytes of the .bin with a digest of their own; the last block of a file may be shorter."""
_ALGORITHM = "sha256"


class ShardDigests(NamedTuple):
    """Digests of a shard, in hex."""

    idx: str
    """sha256 of the whole .idx."""
    bin_bytes: int
    """Size of the .bin."""
    blocks: dict[int, str]
    """sha256 of blocks of the .bin by their number: of all blocks, or of a sample."""
    mask: str | None = None
    """sha256 of the whole label mask; None: there is none, or its digest is unknown."""

    def entry(self) -> dict[str, Any]:
        """The entry "digests" of a manifest; all blocks are known."""
        assert len(self.blocks) == num_blocks(self.bin_bytes), (len(self.blocks), self.bin_bytes)
        return {
            "algorithm": _ALGORITHM,
            "idx": self.idx,
            "bin_bytes": self.bin_bytes,
            "block_bytes": BLOCK_BYTES,
            "blocks": [self.blocks[number] for number in range(len(self.blocks))],
            **({} if self.mask is None else {"mask": self.mask}),
        }


def num_blocks(bin_bytes: int) -> int:
    """Number of blocks of a .bin."""
    return -(-bin_bytes // BLOCK_BYTES)


def parse_digests(entry: Mapping[str, Any]) -> ShardDigests:
    """Reads the entry "digests" of a manifest, whose bytes are untrusted.

    Raises:
        ValueError, KeyError, TypeError: it is no such entry, or one of another version.
    """
    idx, bin_bytes, blocks, mask = entry["idx"], entry["bin_bytes"], entry["blocks"], entry.get("mask")
    if (entry["algorithm"], entry["block_bytes"]) != (_ALGORITHM, BLOCK_BYTES):
        raise ValueError("digests by another rule")
    if type(bin_bytes) is not int or bin_bytes < 0 or type(blocks) is not list or len(blocks) != num_blocks(bin_bytes):
        raise ValueError("a list of blocks that does not fit the size")
    for digest in (idx, *blocks, *([] if mask is None else [mask])):
        if type(digest) is not str or len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
            raise ValueError("not a sha256")
    return ShardDigests(idx, bin_bytes, dict(enumerate(blocks)), mask)


class BlockHasher:
    """sha256 of each block of a stream of bytes."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._state = hashlib.sha256()
        self._filled = 0
        self._num_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        rest = memoryview(data).cast("B")
        self._num_bytes += len(rest)
        while rest:
            part = rest[: BLOCK_BYTES - self._filled]
            self._state.update(part)
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._digests.append(self._state.hexdigest())
                self._state, self._filled = hashlib.sha256(), 0

    def digests(self, idx: str, mask: str | None = None) -> ShardDigests:
        """The digests of a shard with this .bin, an .idx of the sha256 `idx`, and a label mask of the sha256 `mask`."""
        last = [self._state.hexdigest()] if self._filled else []
        return ShardDigests(idx, self._num_bytes, dict(enumerate([*self._digests, *last])), mask)


class HashedFile:
    """A file that is being written, and the sha256 of the bytes written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._state = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes; raises OSError."""
        self._state.update(data)
        self._file.write(data)

    def hexdigest(self) -> str:
        """sha256, in hex."""
        return self._state.hexdigest()
