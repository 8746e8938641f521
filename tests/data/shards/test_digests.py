"""Digests of shards: every writer's are those of the bytes on the disk, and a manifest's are checked when read."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megalin.data.shards.digests import BlockHasher, ShardDigests, num_blocks
from megalin.data.shards.indexed_dataset import Shard, ShardWriter
from megalin.data.shards.inspection import digest_shard
from megalin.data.shards.manifest import read_manifest
from megalin.data.shards.merging import merge_shards, split_shard
from megalin.errors import DataError

BLOCK = 10


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for name in ("digests", "indexed_dataset", "verification"):
        monkeypatch.setattr(f"megalin.data.shards.{name}.BLOCK_BYTES", BLOCK)


def _write(prefix: Path, documents: int = 9, *, label_mask: bool = False) -> Path:
    with ShardWriter(prefix, np.dtype(np.uint16), label_mask=label_mask) as writer:
        for number in range(documents):
            writer.add_sequence(np.arange(number), np.arange(number) % 3 == 0 if label_mask else None)
            writer.end_document()
        writer.publish()
    return prefix


def _on_disk(prefix: Path) -> ShardDigests:
    tokens, mask = Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.mask.bin")
    blocks = [tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK)]
    return ShardDigests(
        hashlib.sha256(Path(f"{prefix}.idx").read_bytes()).hexdigest(),
        len(tokens),
        {number: hashlib.sha256(block).hexdigest() for number, block in enumerate(blocks)},
        None if not mask.exists() else hashlib.sha256(mask.read_bytes()).hexdigest(),
    )


@pytest.mark.parametrize("masks", [0, 1, 2])
def test_every_writer_stores_the_digests_of_its_files(tmp_path, masks):
    first = _write(tmp_path / "a", label_mask=masks > 0)
    second = _write(tmp_path / "b", documents=4, label_mask=masks > 1)
    merge_shards([first, second], tmp_path / "all")
    split_shard(tmp_path / "all", [tmp_path / "p", tmp_path / "q"], [1, 1])
    for name in ("a", "b", "all", "p", "q"):
        with Shard(tmp_path / name) as shard:
            manifest = read_manifest(shard)
            found = ShardDigests(
                shard.index_digest(),
                shard.bin_bytes,
                {number: shard.block_digest(number) for number in range(num_blocks(shard.bin_bytes))},
                None if shard.label_mask is None else shard.label_mask.digest(),
            )
        assert manifest is not None
        assert manifest.digests == found == _on_disk(tmp_path / name)


@pytest.mark.parametrize("sizes", [[], [10], [3, 7, 1], [25], [9, 1, 20, 4]])
def test_blocks_do_not_depend_on_how_bytes_arrive(sizes):
    data, hasher, start = bytes(range(sum(sizes))), BlockHasher(), 0
    for size in sizes:
        hasher.update(data[start : start + size])
        start += size
    expected = [hashlib.sha256(data[start : start + BLOCK]).hexdigest() for start in range(0, len(data), BLOCK)]
    assert hasher.digests("").blocks == dict(enumerate(expected))


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "md5"},
        {"block_bytes": 5},
        {"bin_bytes": -1},
        {"bin_bytes": 10**6},
        {"blocks": "all"},
        {"idx": "00"},
        {"idx": "z" * 64},
        {"idx": 7},
        {"mask": 7},
        {"mask": "00"},
        None,
    ],
)
def test_entry_that_is_not_one_is_refused(tmp_path, change):
    prefix = _write(tmp_path / "x")
    path = Path(f"{prefix}.manifest.json")
    manifest = json.loads(path.read_text())
    manifest["digests"] = None if change is None else manifest["digests"] | change
    path.write_text(json.dumps(manifest))
    with Shard(prefix) as shard, pytest.raises(DataError, match=r"x\.manifest\.json: not a manifest of a shard"):
        read_manifest(shard)


def test_manifest_of_an_earlier_version_has_no_digests(tmp_path):
    prefix = _write(tmp_path / "x")
    path = Path(f"{prefix}.manifest.json")
    path.write_text(json.dumps({"tokens": json.loads(path.read_text())["tokens"], "tokenizer": {"digest": "d"}}))
    with Shard(prefix) as shard:
        manifest = read_manifest(shard)
    assert manifest is not None
    assert manifest.digests is None


@pytest.mark.parametrize("before", [None, {"tokens": 36, "tokenizer": {"digest": "d"}}])
def test_digests_are_added_to_a_shard_without_and_verified_afterwards(tmp_path, before):
    prefix = _write(tmp_path / "x")
    path, tokens = Path(f"{prefix}.manifest.json"), Path(f"{prefix}.bin")
    written = json.loads(path.read_text())
    path.unlink() if before is None else path.write_text(json.dumps(before))
    assert digest_shard(prefix) == "added"
    assert json.loads(path.read_text()) == written | (before or {})
    assert digest_shard(prefix) == "verified"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match=r"x\.bin: block 7 \(bytes 70 to 72\) has sha256 \w+, but .*manifest"):
        digest_shard(prefix)


def test_digest_of_a_label_mask_is_added_to_a_manifest_without_and_verified_afterwards(tmp_path):
    prefix = _write(tmp_path / "x", label_mask=True)
    path, mask = Path(f"{prefix}.manifest.json"), Path(f"{prefix}.mask.bin")
    written = json.loads(path.read_text())
    earlier = written | {"digests": {name: value for name, value in written["digests"].items() if name != "mask"}}
    for before in (earlier, {name: value for name, value in earlier.items() if name != "label_tokens"}):
        path.write_text(json.dumps(before))
        assert digest_shard(prefix) == "added"
        assert json.loads(path.read_text()) == written
    assert digest_shard(prefix) == "verified"
    mask.write_bytes(mask.read_bytes()[:-1] + b"\x00")
    with pytest.raises(DataError, match=r"x\.mask\.bin: has sha256 \w+, but .*manifest\.json has \w+: the file was ch"):
        digest_shard(prefix)
    mask.unlink()
    for read in (digest_shard, lambda prefix: merge_shards([prefix], tmp_path / "merged")):
        with pytest.raises(
            DataError, match=r"x\.mask\.bin: missing, but by \S+x\.manifest\.json the shard was written with"
        ):
            read(prefix)
