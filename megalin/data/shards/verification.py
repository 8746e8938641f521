"""Verification of shards on open: their bytes are read again and compared with digests that were stored earlier."""

from __future__ import annotations

import hashlib
import heapq
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from megalin.data.shards.digests import BLOCK_BYTES, ShardDigests, num_blocks
from megalin.data.shards.indexed_dataset import Shard, bin_path, idx_path, manifest_path
from megalin.data.shards.label_mask import label_mask_path
from megalin.data.shards.manifest import read_manifest
from megalin.errors import DataError

SAMPLE_BLOCKS = 64
"""Blocks of a shard in a sample; all of a smaller shard."""
SAMPLE_BYTES = 16 << 30
"""Most bytes of a sample, over all shards."""
SAMPLE_SECONDS = 10.0
"""Longest time that a sample is read for."""
_THREADS = 2  # of a rank: one reads while the other hashes
_HOST_ID = Path("/proc/sys/kernel/random/boot_id")


class ShardBlock(NamedTuple):
    """A block of the .bin of a shard."""

    shard: int
    """Number in a list of shards."""
    number: int
    """Number in the .bin."""


def all_blocks(shards: Sequence[Shard]) -> list[ShardBlock]:
    """Every block of the shards."""
    return [
        ShardBlock(index, block) for index, shard in enumerate(shards) for block in range(num_blocks(shard.bin_bytes))
    ]


def sample_blocks(shards: Sequence[Shard]) -> list[ShardBlock]:
    """Blocks of a sample: at most 64 of each shard and 16 GiB in all, one of each shard before the second of any.

    A shard's own are a function of its file name and size, so the same are read at every start.
    """
    chosen = [
        [ShardBlock(index, number) for number in _ranked(shard.prefix.name, num_blocks(shard.bin_bytes))]
        for index, shard in enumerate(shards)
    ]
    turns = (block for turn in zip_longest(*chosen) for block in turn if block is not None)
    return list(turns)[: SAMPLE_BYTES // BLOCK_BYTES]


def _ranked(name: str, count: int) -> list[int]:
    """At most 64 of the numbers below `count`, in the order of a hash of (name, number)."""

    def rank(number: int) -> bytes:
        return hashlib.blake2b(f"{name}/{number}".encode(), digest_size=8).digest()

    return heapq.nsmallest(SAMPLE_BLOCKS, range(count), key=rank)


def read_blocks(
    shards: Sequence[Shard], blocks: Iterable[ShardBlock], *, seconds: float | None = None
) -> dict[ShardBlock, str]:
    """sha256, in hex, of each block; those that were not started within `seconds` are missing.

    Raises:
        DataError: a file fails, or has shrunk.
    """
    deadline = None if seconds is None else time.monotonic() + seconds

    def read(block: ShardBlock) -> str | None:
        late = deadline is not None and time.monotonic() > deadline
        return None if late else shards[block.shard].block_digest(block.number)

    blocks = list(blocks)
    with ThreadPoolExecutor(min(_THREADS, max(1, len(blocks)))) as pool:
        return {block: digest for block, digest in zip(blocks, pool.map(read, blocks), strict=True) if digest}


def digests_on_open(shard: Shard) -> ShardDigests:
    """Digests of a shard's .idx and label mask, without blocks of its .bin. Raises DataError if the mask fails."""
    mask = None if shard.label_mask is None else shard.label_mask.digest()
    return ShardDigests(shard.index_digest(), shard.bin_bytes, {}, mask)


def same_files_key(shards: Iterable[Shard]) -> bytes:
    """32 bytes that are equal for processes of one host that opened the very same files, unchanged in between."""
    files = [
        (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        for shard in shards
        for status in (bin_path(shard.prefix).stat(), idx_path(shard.prefix).stat())
    ]
    host = _HOST_ID.read_bytes() if _HOST_ID.exists() else b""
    return hashlib.sha256(host + json.dumps(files).encode()).digest()


def check_digests(
    prefix: Path, found: ShardDigests, stored: ShardDigests, where: str, remedy: str, *, of_bin: bool = True
) -> None:
    """Compares the digests of a shard with stored ones: those of blocks, and of a label mask, that both have.

    Args:
        where: the place of the stored ones, for the message.
        remedy: end of the message.
        of_bin: compare the .bin too, not the .idx alone.

    Raises:
        DataError: they differ; names the file, the block and both digests.
    """
    path = idx_path(prefix)
    if found.idx != stored.idx:
        raise DataError(f"{path}: has sha256 {found.idx}, but {where} has {stored.idx}: the file was changed; {remedy}")
    path = bin_path(prefix)
    if found.bin_bytes != stored.bin_bytes:
        raise DataError(f"{path}: has {found.bin_bytes} bytes, but {where} has {stored.bin_bytes}; {remedy}")
    if found.mask != stored.mask and None not in (found.mask, stored.mask):
        raise DataError(
            f"{label_mask_path(prefix)}: has sha256 {found.mask}, but {where} has {stored.mask}: the file was changed; "
            f"{remedy}"
        )
    common = sorted(found.blocks.keys() & stored.blocks.keys()) if of_bin else []
    differing = [number for number in common if found.blocks[number] != stored.blocks[number]]
    if differing:
        first = differing[0]
        raise DataError(
            f"{path}: {describe_block(first, found.bin_bytes)} has sha256 {found.blocks[first]}, but {where} has "
            f"{stored.blocks[first]} ({len(differing)} of the {len(common)} compared blocks differ): the file was "
            f"changed; {remedy}"
        )


def describe_block(number: int, bin_bytes: int) -> str:
    """Name of a block for messages."""
    return f"block {number} (bytes {number * BLOCK_BYTES} to {min((number + 1) * BLOCK_BYTES, bin_bytes)})"


def check_against_manifest(shard: Shard, found: ShardDigests, *, of_bin: bool = True) -> ShardDigests | None:
    """Compares the digests of a shard with its manifest's, which it returns; None where that has none.

    Raises:
        DataError: as `check_digests`, or a bad manifest.
    """
    manifest = read_manifest(shard)
    if manifest is None or manifest.digests is None:
        return None
    path = manifest_path(shard.prefix)
    remedy = f"restore it, or, if it was changed on purpose, remove {path} and start in a new run folder"
    check_digests(shard.prefix, found, manifest.digests, str(path), remedy, of_bin=of_bin)
    return manifest.digests


def record(digests: ShardDigests) -> dict[str, Any]:
    """JSON of digests, with a root over all of them."""
    blocks = {str(number): digests.blocks[number] for number in sorted(digests.blocks)}
    content = {"idx": digests.idx, "bin_bytes": digests.bin_bytes, "blocks": blocks}
    content |= {} if digests.mask is None else {"mask": digests.mask}
    return {"root": hashlib.sha256(json.dumps(content).encode()).hexdigest(), **content}


def parse_record(value: Mapping[str, Any]) -> ShardDigests:
    """Inverse of `record`. Raises ValueError, KeyError, TypeError or AttributeError for other JSON."""
    blocks = {int(number): str(digest) for number, digest in value["blocks"].items()}
    mask = value.get("mask")
    return ShardDigests(str(value["idx"]), int(value["bin_bytes"]), blocks, None if mask is None else str(mask))
