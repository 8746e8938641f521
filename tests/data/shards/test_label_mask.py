"""The mask format byte for byte, ranges at every offset, every kind of invalid mask, and shards written with masks."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from megalin.data.shards.indexed_dataset import Shard, ShardWriter
from megalin.data.shards.label_mask import LabelMask, LabelMaskWriter
from megalin.data.shards.supervised import SupervisedShard, write_supervised_shard
from megalin.errors import DataError, StorageError
from tests.data.shard_files import mask_bytes, write_by_hand


def _masked(prefix, bits, data=None):
    """A hand-written shard of len(bits) tokens with this mask, or with the bytes `data` in its place."""
    write_by_hand(prefix, [[token % 100 for token in range(len(bits))]])
    Path(f"{prefix}.mask.bin").write_bytes(mask_bytes(bits) if data is None else data)
    return prefix


def test_writer_gives_the_golden_bytes(tmp_path):
    with ShardWriter(tmp_path / "x", np.dtype(np.uint16), label_mask=True) as writer:
        writer.add_sequence([5, 6, 7], np.array([False, True, True]))
        writer.add_sequence([8] * 5)  # without a mask all count
        writer.end_document()
        writer.add_sequence([])
        writer.add_sequence([9, 1], np.array([True, False]))
        writer.end_document()
        writer.publish()
    golden = bytes.fromhex("4d474c4d41534b31 0a00000000000000 fe01")
    assert (tmp_path / "x.mask.bin").read_bytes() == golden
    assert Shard(tmp_path / "x").label_mask.digest() == hashlib.sha256(golden).hexdigest()


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 16, 37])
def test_every_range_is_read(tmp_path, num_tokens):
    bits = np.random.default_rng(num_tokens).random(num_tokens) < 0.5
    with Shard(_masked(tmp_path / "x", bits.tolist())) as shard:
        for first in range(num_tokens + 1):
            for end in range(first, num_tokens + 1):
                assert shard.read_label_mask(first, end - first).tolist() == bits[first:end].tolist()
                assert shard.label_mask.count(first, end) == bits[first:end].sum()
                assert shard.label_mask.any(first, end) == bits[first:end].any()


def test_several_ranges_are_read_at_once(tmp_path):
    bits = np.random.default_rng(0).random(37) < 0.5
    positions, counts = np.array([30, 0, 8, 5, 36, 37, 3]), np.array([7, 9, 8, 0, 1, 0, 20])
    with Shard(_masked(tmp_path / "x", bits.tolist())) as shard:
        ids, mask = shard.read_ranges(positions, counts, vocab_size=65500)
        places = list(zip(positions.tolist(), counts.tolist(), strict=True))
        assert mask.tolist() == [bit for first, count in places for bit in bits[first : first + count]]
        assert ids.tolist() == [value for place in places for value in shard.read(*place)]
        assert all(len(found) == 0 for found in shard.read_ranges(positions[:0], counts[:0], vocab_size=1))


def test_pieces_of_any_size_give_the_same_file(tmp_path, monkeypatch):
    bits = np.random.default_rng(0).random(1000) < 0.3
    writer, place = LabelMaskWriter(tmp_path / "x"), 0
    for size in np.random.default_rng(1).integers(0, 30, 100).tolist():
        writer.add(bits[place : place + size])
        place = min(place + size, 1000)
    writer.publish()
    assert (writer.num_tokens, place) == (1000, 1000)
    assert (tmp_path / "x.mask.bin").read_bytes() == mask_bytes(bits.tolist())
    monkeypatch.setattr("megalin.data.shards.label_mask._BLOCK_BYTES", 7)
    mask = LabelMask(tmp_path / "x", 1000)
    assert mask.digest() == hashlib.sha256(mask_bytes(bits.tolist())).hexdigest()
    assert [mask.count(first, 1000) for first in (0, 1, 999)] == [bits[first:].sum() for first in (0, 1, 999)]


def test_shard_without_a_mask_counts_every_token(tmp_path):
    with Shard(write_by_hand(tmp_path / "x", [[1, 2, 3]])) as shard:
        assert shard.label_mask is None
        assert shard.read_label_mask(1, 2).tolist() == [True, True]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"MGLMASK1\x0a", "expected a header of 16 bytes; found a file of 9 bytes"),
        (b"MGLMASK2" + mask_bytes([True] * 10)[8:], "expected the magic b'MGLMASK1'; found b'MGLMASK2'"),
        (mask_bytes([True] * 9), "expected the mask of 10 tokens, as in its shard; found one of 9"),
        (b"MGLMASK1" + struct.pack("<Q", 2**64 - 1), f"expected the mask of 10 tokens.*found one of {2**64 - 1}"),
        (mask_bytes([True] * 10)[:-1], "expected 18 bytes for 10 tokens; found 17 bytes"),
        (mask_bytes([True] * 10) + b"\0", "expected 18 bytes for 10 tokens; found 19 bytes"),
        (mask_bytes([True] * 10)[:-1] + b"\x07", "expected zeros after the 2 used bits of the last byte; found 0x07"),
    ],
    ids=["short", "magic", "other tokens", "largest count", "truncated", "longer", "trailing bits"],
)
def test_mask_that_does_not_match_its_shard_is_refused(tmp_path, data, message):
    prefix = _masked(tmp_path / "x", [True] * 10, data)
    with pytest.raises(DataError, match=rf"x\.mask\.bin: {message}; write the mask again .*, or remove it and the"):
        Shard(prefix)


def test_mask_that_is_a_dangling_link_is_refused(tmp_path):
    write_by_hand(tmp_path / "x", [[1, 2, 3]])
    (tmp_path / "x.mask.bin").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"x\.mask\.bin: no such file; write the mask again"):
        Shard(tmp_path / "x")


def test_mask_that_shrinks_raises_instead_of_killing(tmp_path):
    with Shard(_masked(tmp_path / "x", [True] * 100)) as shard:
        (tmp_path / "x.mask.bin").write_bytes(b"MGLMASK1")
        with pytest.raises(DataError, match=r"x\.mask\.bin: expected 29 bytes, as on open; found its end at byte 16"):
            shard.read_label_mask(0, 5)


def test_rewriting_without_a_mask_removes_the_old_one(tmp_path):
    write_supervised_shard(tmp_path / "x", [([1, 2], [True, False])], vocab_size=9)
    with ShardWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_sequence([3, 4])
        writer.end_document()
        writer.publish()
    assert Shard(tmp_path / "x").label_mask is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.manifest.json"]


def test_tokens_of_a_shard_named_like_a_mask_are_not_removed(tmp_path):
    write_by_hand(tmp_path / "x.mask", [[1, 2, 3]])
    with ShardWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.publish()
    assert Shard(tmp_path / "x.mask").read(0, 3).tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"x\.mask\.bin: expected a header of 16 bytes; found a file of 6 bytes"):
        Shard(tmp_path / "x")


def test_unpublished_and_failed_writers_leave_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    with ShardWriter(tmp_path / "x", np.dtype(np.uint16), label_mask=True) as writer:
        writer.add_sequence([1])
        writer.end_document()
    assert list(tmp_path.iterdir()) == []
    with LabelMaskWriterHeld(tmp_path / "x"), pytest.raises(StorageError, match=r"x\.mask\.bin\.tmp: another process"):
        ShardWriter(tmp_path / "x", np.dtype(np.uint16), label_mask=True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_supervised_shard(tmp_path / "x", [([1], [True])], vocab_size=9)
    assert list(tmp_path.iterdir()) == []


class LabelMaskWriterHeld:
    """Context in which the mask's temporary file is locked by another writer."""

    def __init__(self, prefix):
        self.writer = LabelMaskWriter(prefix)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.writer.discard()


def test_supervised_shard_is_written_from_a_generator(tmp_path):
    pairs = [([7, 8, 9], [False, False, True]), ([], []), (np.array([65000], np.int32), np.array([True]))]
    written = write_supervised_shard(tmp_path / "x", (pair for pair in pairs), vocab_size=65499)
    assert written == SupervisedShard(str(tmp_path / "x"), documents=3, tokens=4, labels=2)
    with Shard(tmp_path / "x") as shard:
        assert shard.dtype == np.uint16
        assert (shard.documents.tolist(), shard.lengths.tolist()) == ([0, 1, 1, 2], [3, 1])
        assert shard.read(0, 4).tolist() == [7, 8, 9, 65000]
        assert shard.read_label_mask(0, 4).tolist() == [False, False, True, True]
    assert (tmp_path / "x.mask.bin").read_bytes() == mask_bytes([False, False, True, True])


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 2], [1, 0], "document 1: a label mask of dtype int64; give bool"),
        ([1, 2], [True], r"document 1: a label mask of shape \[1\] for 2 ids; give one entry an id"),
        ([1, 9], [True, True], "document 1: token id 9; give ids from 0 to vocab_size - 1 = 8"),
        ([-1, 3], [True, True], "document 1: token id -1; give ids"),
        ([[1, 2]], [[True, True]], r"document 1: ids of shape \[1, 2\] and dtype int64; give \[tokens\] of integers"),
        ([1.0], [True], r"document 1: ids of shape \[1\] and dtype float64; give \[tokens\] of integers"),
    ],
)
def test_document_with_a_bad_mask_is_refused(tmp_path, ids, mask, message):
    with pytest.raises(DataError, match=message):
        write_supervised_shard(tmp_path / "x", [([1], [True]), (ids, mask)], vocab_size=9)
    assert list(tmp_path.iterdir()) == []
