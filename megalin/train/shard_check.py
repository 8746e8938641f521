"""Verification of a run's shards at its start: against their manifests, the run folder, and the other ranks."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalin.data.shards.digests import ShardDigests
from megalin.data.shards.indexed_dataset import Shard, bin_path, idx_path, manifest_path
from megalin.data.shards.verification import (
    SAMPLE_SECONDS,
    ShardBlock,
    all_blocks,
    check_against_manifest,
    check_digests,
    describe_block,
    digests_on_open,
    parse_record,
    read_blocks,
    record,
    same_files_key,
    sample_blocks,
)
from megalin.data.shards.watch import KnownDigests, ShardWatch
from megalin.errors import DataError, MegalinError
from megalin.files import read_limited
from megalin.parallel.agreement import (
    gather_over_ranks,
    max_over_ranks,
    on_every_rank,
    on_rank_zero,
    rank,
    world_size,
)
from megalin.train.identity import check_same_over_ranks

_WORDS = 4  # int64 of a sha256
_UNREAD = torch.iinfo(torch.int64).min
_RECORD_LIMIT_BYTES = 1 << 28

_log = logging.getLogger(__name__)


class VerifiedShards(NamedTuple):
    """Digests of a run's shards as they were read at its start, equal on every rank."""

    records: dict[Path, dict[str, Any]]
    """For checkpoints: a record of each shard with the blocks of a sample, by prefix."""
    kept: dict[str, dict[str, Any]]
    """For the run folder: records of the shards without digests in a manifest, of this start and earlier ones."""
    line: str
    """Summary for people."""
    watch: ShardWatch
    """Compares these bytes with the shards' while the run reads them."""


def verify_shards(shards: Sequence[Shard], mode: Literal["full", "sample", "off"], earlier: Path) -> VerifiedShards:
    """Reads the .idx and label mask of each shard and blocks of its .bin again and compares their digests; a
    collective.

    Ranks of one host with the same files share the reading. One all-gather of 64 bytes and one all-reduce of 64 bytes a
    block compare the ranks. Digests are never taken from a manifest: they are of the bytes that were read.

    Args:
        shards: the same on every rank.
        earlier: file of the run folder with `VerifiedShards.kept` of earlier starts.

    Raises:
        DataError: on every rank, if a shard differs from its manifest, from what the run read earlier, or between
            ranks, or cannot be read; names the file, what differs, and the remedy.
    """
    shards = list({shard.prefix: shard for shard in shards}.values())
    watch = ShardWatch(shards)
    if mode == "off" or not shards:
        return VerifiedShards({}, {}, "shards: not verified (data.verify = off)", watch)
    started = time.perf_counter()
    found: list[ShardDigests] = []
    on_every_rank(lambda: found.extend(map(_check_open, shards)))
    sharing = _compare_indexes(shards, found)
    sample = sample_blocks(shards)
    blocks = all_blocks(shards) if mode == "full" else sample
    digests = _read_shared(shards, blocks, sharing, seconds=None if mode == "full" else SAMPLE_SECONDS)
    for block, digest in digests.items():
        found[block.shard].blocks[block.number] = digest
    stored: list[ShardDigests | None] = []
    on_every_rank(lambda: stored.extend(map(check_against_manifest, shards, found)))
    kept = on_rank_zero(lambda: _check_earlier(shards, found, [each is not None for each in stored], earlier))
    watch.set_known(_known(shards, found, stored, kept), place=sharing.place, ranks=sharing.ranks)
    in_sample: list[dict[int, str]] = [{} for _ in shards]
    for block in filter(digests.get, sample):
        in_sample[block.shard][block.number] = digests[block]
    records = {
        shard.prefix: record(each._replace(blocks=own))
        for shard, each, own in zip(shards, found, in_sample, strict=True)
    }
    line = (
        f"shards: {len(shards)} verified in {time.perf_counter() - started:.1f} s (data.verify = {mode}): all of each "
        f".idx and label mask, {len(digests)} of {len(all_blocks(shards))} blocks of 16 MiB"
    )
    return VerifiedShards(records, kept, line, watch)


def _check_open(shard: Shard) -> ShardDigests:
    """The digests of a shard without its .bin, compared with its manifest's."""
    found = digests_on_open(shard)
    check_against_manifest(shard, found, of_bin=False)
    return found


def _known(
    shards: Sequence[Shard],
    found: Sequence[ShardDigests],
    stored: Sequence[ShardDigests | None],
    kept: Mapping[str, Mapping[str, Any]],
) -> list[KnownDigests]:
    """Digests of each shard: its manifest's, else those that this run read at this start or an earlier one."""
    known = []
    for shard, own, manifest in zip(shards, found, stored, strict=True):
        earlier = kept.get(str(shard.prefix))
        read = own if earlier is None else parse_record(earlier)
        origin = "this run, earlier," if manifest is None else str(manifest_path(shard.prefix))
        known.append(KnownDigests((manifest or read)._replace(mask=own.mask), origin))
    return known


class _Sharing(NamedTuple):
    """This rank among those that opened the very same files."""

    place: int
    ranks: int


def _compare_indexes(shards: Sequence[Shard], found: Sequence[ShardDigests]) -> _Sharing:
    """Compares the .idx files, whose sizes are those of the .bin, over the ranks.

    Raises:
        DataError: on every rank, if they differ.
    """
    names = [f"{idx_path(shard.prefix).name} of shard {number}" for number, shard in enumerate(shards)]
    check_same_over_ranks(dict(zip(names, [digests.idx for digests in found], strict=True)), DataError)
    keys = gather_over_ranks(_words(same_files_key(shards)))  # [ranks, words]
    same = (keys == keys[rank()]).all(1)
    return _Sharing(int(same[: rank()].sum()), int(same.sum()))


def _read_shared(
    shards: Sequence[Shard], blocks: Sequence[ShardBlock], sharing: _Sharing, *, seconds: float | None
) -> dict[ShardBlock, str]:
    """Digests of the blocks, each read by one of the ranks that share files; without those that none read in time.

    Raises:
        DataError: on every rank, if a block cannot be read, or differs between ranks.
    """
    own, error = torch.full((len(blocks), _WORDS), _UNREAD), None
    try:
        read = read_blocks(shards, blocks[sharing.place :: sharing.ranks], seconds=seconds)
    except MegalinError as raised:
        error, read = raised, {}
    places = {block: place for place, block in enumerate(blocks)}
    for block, digest in read.items():
        own[places[block]] = _words(bytes.fromhex(digest))
    unread = (own == _UNREAD).all(1)[:, None]
    # The maximum of the complement is the complement of the minimum: with it, one all-reduce finds disagreements.
    both = torch.stack([own, torch.where(unread, _UNREAD, ~own)])
    *rest, failed = max_over_ranks(torch.cat([both.flatten(), torch.tensor([int(error is not None)])])).split(
        [both.numel(), 1]
    )
    if failed:
        on_every_rank(lambda: _raise(error))
    largest, complement = rest[0].view_as(both)
    known = (largest != _UNREAD).any(1)
    differing = (known & (largest != ~complement).any(1)).nonzero()
    if len(differing):
        place = int(differing[0])
        gathered = gather_over_ranks(own[place])  # [ranks, words]
        first = next(words for words in gathered if (words != _UNREAD).any())
        other = next(
            number for number, words in enumerate(gathered) if (words != _UNREAD).any() and (words != first).any()
        )
        shard = shards[blocks[place].shard]
        name = f"{bin_path(shard.prefix)}: {describe_block(blocks[place].number, shard.bin_bytes)}"
        raise _disagreement(name, gathered, other)
    return {block: _hex(largest[place]) for place, block in enumerate(blocks) if known[place]}


def _raise(error: MegalinError | None) -> None:
    if error is not None:
        raise error


def _disagreement(name: str, digests: Tensor, other: int) -> DataError:
    """Error for digests [ranks, words] of which that of rank `other` differs from the first one."""
    first = next(number for number, words in enumerate(digests) if (words != _UNREAD).any())
    return DataError(
        f"{name} has sha256 {_hex(digests[other])} on rank {other}, but {_hex(digests[first])} on rank {first}; give "
        f"all {world_size()} ranks the same shards"
    )


def _check_earlier(
    shards: Sequence[Shard], found: Sequence[ShardDigests], stored: Sequence[bool], path: Path
) -> dict[str, dict[str, Any]]:
    """Compares shards without digests in a manifest with what the run read of them earlier; returns all records.

    Raises:
        DataError: they differ.
    """
    earlier = _read_earlier(path)
    kept = {prefix: record(digests) for prefix, digests in earlier.items()}
    remedy = "restore it, or start in a new run folder"
    for shard, digests, has_manifest in zip(shards, found, stored, strict=True):
        prefix = str(shard.prefix)
        before = earlier.get(prefix)
        if before is not None:
            check_digests(shard.prefix, digests, before, f"{path}, from an earlier start of this run,", remedy)
        if not has_manifest:
            blocks = digests.blocks if before is None else {**before.blocks, **digests.blocks}
            kept[prefix] = record(digests._replace(blocks=blocks))
    return kept


def _read_earlier(path: Path) -> dict[str, ShardDigests]:
    if not path.exists():
        return {}
    try:
        values: Mapping[str, Any] = json.loads(read_limited(path, limit_bytes=_RECORD_LIMIT_BYTES, follow_links=False))
        return {prefix: parse_record(value) for prefix, value in values.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: not a record of shards; restore it, or remove it to read the shards again") from None


def _words(digest: bytes) -> Tensor:
    """A sha256 as [4] int64."""
    return torch.from_numpy(np.frombuffer(digest, "<i8").astype(np.int64))


def _hex(words: Tensor) -> str:
    return words.numpy().astype("<i8").tobytes().hex()


def check_records(
    saved: Mapping[str, Sequence[Mapping[str, Any]]],
    given: Mapping[str, Sequence[Mapping[str, Any]]],
    prefixes: Mapping[str, Sequence[Path]],
    where: str,
) -> None:
    """Compares the records of the shards of each source with those in a checkpoint.

    Args:
        prefixes: of the shards of each source of this run.
        where: the checkpoint, for the message.

    Raises:
        DataError: the shards differ; names the file, what differs, and both digests.
    """
    remedy = "the run was trained on other bytes; restore the shard, or start in a new run folder"
    for name in saved.keys() & given.keys():
        if len(saved[name]) != len(given[name]):
            raise DataError(
                f"source {name}: {len(given[name])} shards, but {where} has {len(saved[name])}; list the same shards"
            )
        for prefix, before, now in zip(prefixes[name], saved[name], given[name], strict=True):
            if before.get("root") != now.get("root"):
                check_digests(prefix, parse_record(now), parse_record(before), where, remedy)
