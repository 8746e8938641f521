"""The watch over open shards: changed bytes are named, with and without a write that the file system shows."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalin.data.shards import watch as module
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.shards.manifest import read_manifest
from megalin.data.shards.supervised import write_supervised_shard
from megalin.data.shards.watch import KnownDigests, ShardWatch
from megalin.errors import DataError

BLOCK, BLOCKS = 64, 6
BIN, MASK = "x.bin", "x.mask.bin"


@pytest.fixture
def shard(tmp_path, monkeypatch):
    for name in ("digests", "indexed_dataset", "verification"):
        monkeypatch.setattr(f"megalin.data.shards.{name}.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(module, "_LEAST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "_HASHING_FRACTION", 1.0)
    pairs = [([k] * 32, [k % 2 == 0] * 32) for k in range(BLOCKS)]
    write_supervised_shard(tmp_path / "x", pairs, vocab_size=9)
    for name in (BIN, MASK):  # long before it is read
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    with Shard(tmp_path / "x") as opened:
        yield opened


def _watch(shard: Shard, place: int = 0, ranks: int = 1) -> ShardWatch:
    manifest = read_manifest(shard)
    assert manifest is not None
    assert manifest.digests is not None
    watch = ShardWatch([shard])
    watch.set_known([KnownDigests(manifest.digests, "the manifest")], place=place, ranks=ranks)
    return watch


def _flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 1]))


@pytest.mark.parametrize(
    ("name", "byte", "message"),
    [
        (
            BIN,
            2 * BLOCK + 5,
            r"x\.bin: block 2 \(bytes 128 to 192\) has sha256 \w+, but the manifest has .*it changed",
        ),
        (MASK, 17, r"x\.mask\.bin: has sha256 \w+, but the manifest has \w+: the file was changed; it changed while"),
    ],
)
def test_bytes_that_are_written_after_the_start_are_refused_from_then_on(shard, tmp_path, name, byte, message):
    watch = _watch(shard)
    watch.check()
    _flip(tmp_path / name, byte)
    for look in (watch.check, watch.check, watch.raise_problem):
        with pytest.raises(DataError, match=message):
            look()


def _rewrite(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)


TOUCHES: list[Callable[[Path], None]] = [_rewrite, os.utime, lambda path: path.chmod(0o600)]


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("name", [BIN, MASK])
def test_a_touched_file_with_the_same_bytes_is_accepted_with_one_warning(shard, tmp_path, caplog, touch, name):
    watch = _watch(shard)
    for _ in range(2):
        touch(tmp_path / name)
        watch.check()
    assert caplog.text.count("x: its files were touched while the run reads them, with the same bytes") == 1
    _flip(tmp_path / name, 20)
    with pytest.raises(DataError, match="it changed while the run read it"):
        watch.check()


def test_a_file_that_was_replaced_is_none_of_the_runs(shard, tmp_path, caplog):
    watch = _watch(shard)
    write_supervised_shard(tmp_path / "x", [([7] * 50, [True] * 50)], vocab_size=9)
    watch._compare(0, range(BLOCKS))
    watch.check()
    assert shard.read(0, 3).tolist() == [0, 0, 0]


def test_without_digests_a_write_is_refused_and_a_new_mode_is_not(shard, tmp_path):
    watch = ShardWatch([shard])
    (tmp_path / BIN).chmod(0o600)
    watch.check()
    _rewrite(tmp_path / BIN)
    with pytest.raises(
        DataError, match=rf"x\.bin: was written while the run reads it, and {BLOCKS} of its blocks have no"
    ):
        watch.check()


def test_another_size_and_a_failing_file_are_named(shard, tmp_path, monkeypatch):
    watch = _watch(shard)
    with (tmp_path / BIN).open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        DataError, match=rf"x\.bin: expected {BLOCK * BLOCKS} bytes, as on open; found {BLOCK * BLOCKS + 4}"
    ):
        watch.check()
    watch = ShardWatch([shard])

    def stale(_: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        with pytest.raises(DataError, match=r"x\.bin: Stale file handle; check the file system"):
            watch.check()


@pytest.mark.parametrize(("name", "byte"), [(BIN, 0), (BIN, BLOCK * BLOCKS - 1), (MASK, 16)])
def test_bytes_that_change_without_a_write_are_found_in_the_background(shard, tmp_path, monkeypatch, name, byte):
    stamps = module._stamps(shard)
    monkeypatch.setattr(module, "_stamps", lambda _: stamps)
    with _watch(shard) as watch:
        _flip(tmp_path / name, byte)
        assert watch._thread is not None
        watch._thread.join(30)
    with pytest.raises(DataError, match="it changed while the run read it"):
        watch.raise_problem()


def test_blocks_without_a_digest_are_compared_from_their_second_time_on(shard, tmp_path):
    watch = _watch(shard)
    assert watch._known is not None
    blocks = watch._known[0].digests.blocks
    expected = dict(blocks)
    blocks.clear()
    watch._compare(0, range(BLOCKS))
    assert blocks == expected
    _flip(tmp_path / BIN, BLOCK)
    with pytest.raises(DataError, match=r"x\.bin: block 1 "):
        watch._compare(0, range(BLOCKS))


def test_ranks_that_share_files_share_their_blocks(shard, monkeypatch):
    read: list[int] = []
    monkeypatch.setattr(Shard, "block_digest", lambda _, number: read.append(number) or "")
    monkeypatch.setattr(module, "check_digests", lambda *_: None)
    ranks = BLOCKS + 1
    for place in range(ranks):
        work = _watch(shard, place, ranks)._work()
        for compare in itertools.islice(work, 1 + (place == 0)):
            compare()
    assert sorted(read) == [*range(BLOCKS)]  # the last rank has none
