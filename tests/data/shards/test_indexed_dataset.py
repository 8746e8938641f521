"""The shard format byte for byte, and every kind of invalid shard."""

import errno
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megalin.data.shards.indexed_dataset import Shard, ShardWriter, token_dtype
from megalin.data.shards.inspection import digest
from megalin.errors import DataError, StorageError
from tests.data.shard_files import index_bytes, write_by_hand

SEQUENCES = [[5, 6, 7], [1], [9, 8, 7, 6]]


def _write(prefix, sequences=SEQUENCES, dtype=np.uint16, manifest=None):
    with ShardWriter(prefix, np.dtype(dtype)) as writer:
        for sequence in sequences:
            writer.add_sequence(sequence)
            writer.end_document()
        writer.publish(manifest)
    return prefix


def test_writer_gives_the_golden_bytes_of_uint16(tmp_path):
    prefix = tmp_path / "golden"
    with ShardWriter(prefix, token_dtype(65499)) as writer:
        writer.add_sequence([1, 2, 65535])
        writer.add_sequence(np.array([4], np.int64))
        writer.end_document()
        writer.end_document()  # an empty document repeats the index
        writer.add_sequence(np.array([7, 8], np.uint16))
        writer.end_document()
        writer.publish()
    assert Path(f"{prefix}.bin").read_bytes() == bytes.fromhex("0100 0200 ffff 0400 0700 0800")
    assert Path(f"{prefix}.idx").read_bytes() == bytes.fromhex(
        "4d4d494449445800 00"  # magic
        "0100000000000000 08"  # version 1, uint16
        "0300000000000000 0400000000000000"  # 3 sequences, 4 document entries
        "03000000 01000000 02000000"  # lengths
        "0000000000000000 0600000000000000 0800000000000000"  # pointers
        "0000000000000000 0200000000000000 0200000000000000 0300000000000000"  # documents
    )


def test_writer_gives_the_golden_bytes_of_int32(tmp_path):
    prefix = _write(tmp_path / "golden", [[70000, 1]], token_dtype(65500))
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<2i", 70000, 1)
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes([2], [0, 1], code=4, itemsize=4)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_dtype_follows_the_vocabulary(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)


def test_reader_reads_a_shard_written_by_hand(tmp_path):
    with Shard(write_by_hand(tmp_path / "x", [*SEQUENCES, []], [0, 2, 2, 4])) as shard:
        assert (shard.num_documents, shard.num_sequences, shard.num_tokens) == (3, 4, 8)
        assert shard.lengths.tolist() == [3, 1, 4, 0]
        assert shard.read(2, 4).tolist() == [7, 1, 9, 8]
        assert [shard.first_token(k) for k in range(5)] == [0, 3, 4, 8, 8]
        assert [shard.locate(p) for p in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 3)]


def test_empty_sequences_are_never_located(tmp_path):
    with Shard(write_by_hand(tmp_path / "x", [[], [1], [], [], [2, 3], []])) as shard:
        assert [shard.locate(p) for p in range(3)] == [(1, 0), (4, 0), (4, 1)]


@pytest.mark.parametrize("sequences", [[], [[]], [[], [3], []]])
def test_empty_shards_and_documents_round_trip(tmp_path, sequences):
    with Shard(_write(tmp_path / "x", sequences)) as shard:
        assert shard.num_documents == len(sequences)
        assert shard.read(0, shard.num_tokens).tolist() == [token for s in sequences for token in s]


def test_round_trip_over_several_check_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("megalin.data.shards.index_file._BLOCK_ENTRIES", 7)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 65535, rng.integers(0, 9)).tolist() for _ in range(50)]
    prefix = _write(tmp_path / "x", sequences)
    by_hand = write_by_hand(tmp_path / "y", sequences)
    assert digest(prefix) == digest(by_hand)
    with Shard(prefix) as shard:
        starts = [shard.first_token(k) for k in range(51)]
        assert [shard.read(a, b - a).tolist() for a, b in itertools.pairwise(starts)] == sequences


def test_digest_depends_on_every_byte(tmp_path):
    first = digest(_write(tmp_path / "x"))
    assert digest(_write(tmp_path / "y")) == first
    for suffix in ("bin", "idx"):
        path = tmp_path / f"y.{suffix}"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert digest(tmp_path / "y") != first
        data[-1] ^= 1
        path.write_bytes(data)


BAD_INDEX = {
    "magic": (index_bytes([8], [0, 1], magic=b"MMIDIDX\x00\x01"), "expected the magic .*; found "),
    "fairseq": (b"TNTIDX\x00\x00" + bytes(40), "a TNTIDX .*convert it to the MMIDIDX format"),
    "empty": (b"", "expected a header of 34 bytes; found a file of 0 bytes"),
    "short header": (index_bytes([8], [0, 1])[:33], "expected a header of 34 bytes; found a file of 33 bytes"),
    "version": (index_bytes([8], [0, 1], version=2), "expected version 1; found 2"),
    "float dtype": (
        index_bytes([8], [0, 1], code=6),
        r"expected .*8 \(uint16\) or 4 \(int32\); found code 6 \(float64\)",
    ),
    "unknown dtype": (index_bytes([8], [0, 1], code=77), r"expected .*found code 77 \(unknown\)"),
    "byte dtype": (index_bytes([8], [0, 1], code=1), r"expected .*found code 1 \(uint8\)"),
    "truncated": (index_bytes([8], [0, 1])[:-1], "expected 62 bytes for 1 sequences and 2 document .*; found 61 bytes"),
    "trailing": (index_bytes([8], [0, 1]) + b"ab", "expected 62 bytes for .*; found 64 bytes"),
    "multimodal": (index_bytes([8], [0, 1]) + b"\0", "expected .*found 63 bytes, as in a multimodal index with modes"),
    "huge count": (
        index_bytes([8], [0, 1], num_sequences=2**63),
        "expected 110680464442257309746 bytes for 9223372036854775808 .*; found 62",
    ),
    "wrapping count": (index_bytes([8], [0, 1], num_sequences=2**62 + 1), "expected .*found 62 bytes"),
    "huge documents": (index_bytes([8], [0, 1], num_entries=2**61 + 2), "expected .*found 62 bytes"),
    "no documents": (index_bytes([8], []), "expected at least one document entry; found none"),
    "negative length": (index_bytes([9, -1], [0, 2]), "expected .*length of at least 0 for sequence 1; found -1"),
    "pointer": (index_bytes([4, 4], [0, 2], pointers=[0, 6]), "expected pointer 8 for sequence 1; found 6"),
    "first pointer": (index_bytes([8], [0, 1], pointers=[2]), "expected pointer 0 for sequence 0; found 2"),
    "negative pointer": (index_bytes([8], [0, 1], pointers=[-(2**63)]), "expected .*found -9223372036854775808"),
    "long": (index_bytes([9], [0, 1]), r"x\.bin: expected 18 bytes \(9 uint16 tokens in x.idx\); found 16 bytes"),
    "int32 for uint16": (index_bytes([8], [0, 1], code=4), r"x\.bin: expected 32 bytes \(8 int32 .*found 16 bytes"),
    "document start": (index_bytes([8], [1, 1]), "expected document index 0 to be 0; found 1"),
    "document order": (
        index_bytes([4, 4], [0, 2, 1, 2]),
        "expected document index 2 not below the previous one; found 1",
    ),
    "document end": (
        index_bytes([4, 4], [0, 1]),
        "expected .*last document index to be 2, the sequence count; found 1",
    ),
    "document past": (
        index_bytes([4, 4], [0, 3]),
        "expected .*last document index to be 2, the sequence count; found 3",
    ),
}


@pytest.mark.parametrize("kind", BAD_INDEX)
def test_bad_index_is_refused_with_file_expected_and_found(tmp_path, kind):
    data, message = BAD_INDEX[kind]
    write_by_hand(tmp_path / "x", SEQUENCES)
    (tmp_path / "x.idx").write_bytes(data)
    with pytest.raises(DataError, match=rf"^{tmp_path}/(x\.idx: )?{message}"):
        Shard(tmp_path / "x")


def test_too_many_sequences_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megalin.data.shards.index_file.MAX_SEQUENCES", 2)
    with pytest.raises(DataError, match="expected at most 2 sequences; found 3"):
        Shard(write_by_hand(tmp_path / "x", SEQUENCES))


def test_huge_counts_are_refused_without_allocating(tmp_path):
    write_by_hand(tmp_path / "x", SEQUENCES)
    (tmp_path / "x.idx").write_bytes(index_bytes([8], [0, 1], num_sequences=2**40))
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            Shard(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_missing_file_is_named(tmp_path, suffix):
    prefix = write_by_hand(tmp_path / "x", SEQUENCES)
    Path(f"{prefix}.{suffix}").unlink()
    with pytest.raises(DataError, match=rf"x\.{suffix}: no such file; give the prefix of a shard"):
        Shard(prefix)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_pipes_and_folders_are_refused_at_once(tmp_path, suffix):
    prefix = write_by_hand(tmp_path / "x", SEQUENCES)
    path = Path(f"{prefix}.{suffix}")
    for make in (os.mkfifo, os.mkdir):
        path.unlink()
        make(path)
        with pytest.raises(DataError, match=rf"x\.{suffix}: expected a regular file, found a folder, pipe or device"):
            Shard(prefix)
        if path.is_dir():
            path.rmdir()
            path.touch()


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    prefix = write_by_hand(tmp_path / "x", SEQUENCES)

    def deny(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", deny)
    with pytest.raises(
        DataError, match=r"x\.bin: cannot be read by user \d+ \(mode \d+, owner \d+\): Permission denied"
    ):
        Shard(prefix)


@pytest.mark.parametrize("change", [-1, 1, 2])
def test_bin_of_wrong_length_is_refused(tmp_path, change):
    prefix = write_by_hand(tmp_path / "x", SEQUENCES)
    data = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(DataError, match=rf"x\.bin: expected 16 bytes .*; found {16 + change} bytes; truncated, or of"):
        Shard(prefix)


def test_swapped_files_of_two_shards_are_refused(tmp_path):
    write_by_hand(tmp_path / "x", SEQUENCES)
    write_by_hand(tmp_path / "y", [*SEQUENCES, [1]])
    (tmp_path / "x.bin").rename(tmp_path / "t")
    (tmp_path / "y.bin").rename(tmp_path / "x.bin")
    (tmp_path / "t").rename(tmp_path / "y.bin")
    for name, found in (("x", 18), ("y", 16)):
        with pytest.raises(DataError, match=rf"{name}\.bin: expected .*; found {found} bytes; .*of another shard"):
            Shard(tmp_path / name)


def test_uint16_cannot_serve_a_larger_vocabulary(tmp_path):
    prefix = write_by_hand(tmp_path / "x", SEQUENCES)
    Shard(prefix, vocab_size=2**16).close()
    with pytest.raises(DataError, match=r"x\.idx: expected a dtype that holds 65537 token ids; found uint16"):
        Shard(prefix, vocab_size=2**16 + 1)


def test_bin_that_shrinks_while_open_is_an_error_not_a_crash(tmp_path):
    with Shard(write_by_hand(tmp_path / "x", SEQUENCES)) as shard:
        os.truncate(tmp_path / "x.bin", 6)
        assert shard.read(0, 3).tolist() == [5, 6, 7]
        with pytest.raises(DataError, match=r"x\.bin: expected 16 bytes, as on open; found its end at byte 6"):
            shard.read(0, 8)


@pytest.mark.parametrize(
    ("number", "tries", "message"),
    [
        (errno.EIO, 3, r"x\.bin: cannot be read at byte 4, 3 times: Input/output error"),
        (errno.EBADF, 1, r"x\.bin: cannot be read at byte 4: Bad file descriptor"),
    ],
)
def test_failing_read_names_file_and_byte(tmp_path, monkeypatch, number, tries, message):
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("megalin.files._RETRY_SECONDS", (0, 0))
    with Shard(write_by_hand(tmp_path / "x", SEQUENCES)) as shard:
        monkeypatch.setattr("os.preadv", fail)
        with pytest.raises(DataError, match=message):
            shard.read(2, 1)
    assert len(calls) == tries


def test_index_that_shrinks_while_open_stays_readable(tmp_path):
    """A memory-mapped index would end this process with SIGBUS."""
    with Shard(write_by_hand(tmp_path / "x", SEQUENCES)) as shard:
        lengths = [len(sequence) for sequence in SEQUENCES]
        os.truncate(tmp_path / "x.idx", 0)
        assert shard.lengths.tolist() == lengths


def test_flipped_bits_of_an_index_are_refused(tmp_path):
    """Flips are accepted only in the inner document indices, which nothing else fixes; the tokens are unchanged."""
    rng = random.Random(0)
    prefix = write_by_hand(tmp_path / "x", [list(range(k % 5)) for k in range(40)], [0, 3, 9, 9, 20, 40])
    good = (tmp_path / "x.idx").read_bytes()
    inner = range(len(good) - 5 * 8, len(good) - 8)
    with Shard(prefix) as shard:
        lengths, tokens = shard.lengths.tolist(), shard.read(0, shard.num_tokens).tolist()
    accepted, messages = 0, []
    for _ in range(600):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if data == good:
            continue
        (tmp_path / "x.idx").write_bytes(data)
        try:
            shard = Shard(prefix)
        except DataError as error:
            messages.append(str(error))
            continue
        with shard:
            accepted += 1
            changed = [k for k in range(len(good)) if data[k] != good[k]]
            assert all(k in inner for k in changed), changed
            assert shard.lengths.tolist() == lengths
            assert shard.read(0, shard.num_tokens).tolist() == tokens
            assert sorted(shard.documents) == shard.documents.tolist()
    assert accepted < 20
    assert all(message.startswith(f"{tmp_path}/x.") for message in messages)


@pytest.mark.parametrize(
    ("dtype", "ids"),
    [(np.uint16, [65536]), (np.uint16, [1, -1]), (np.int32, [2**31]), (np.int32, [-7]), (np.int32, np.int32([1, -7]))],
)
def test_writer_refuses_ids_that_do_not_fit(tmp_path, dtype, ids):
    token = ids[-1]
    with (
        ShardWriter(tmp_path / "x", np.dtype(dtype)) as writer,
        pytest.raises(DataError, match=rf"x\.bin: expected token ids from 0 to \d+ .*; found {token}"),
    ):
        writer.add_sequence(ids)


def test_writer_refuses_a_folder_that_is_missing(tmp_path):
    with pytest.raises(StorageError, match=r"x\.bin\.tmp: cannot be written: No such file"):
        ShardWriter(tmp_path / "missing" / "x", np.dtype(np.uint16))


def test_full_disk_publishes_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    with ShardWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_sequence([1])
        writer.end_document()
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match=r"x\.bin: cannot be written: No space left on device; check the folder"):
            writer.publish()
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_shard_are_refused(tmp_path):
    with ShardWriter(tmp_path / "x", np.dtype(np.uint16)) as first:
        with pytest.raises(StorageError, match=r"x\.bin\.tmp: another process is writing it"):
            ShardWriter(tmp_path / "x", np.dtype(np.uint16))
        first.add_sequence([3])
        first.end_document()
        first.publish()
    assert Shard(tmp_path / "x").read(0, 1).tolist() == [3]


def test_unpublished_writer_leaves_nothing(tmp_path):
    with ShardWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_sequence([1, 2])
        writer.end_document()
    assert list(tmp_path.iterdir()) == []


def test_rewriting_never_pairs_old_and_new_files(tmp_path, monkeypatch):
    prefix = _write(tmp_path / "x", [[1, 2], [3]], manifest={"tokens": 3})
    seen = []
    real = os.replace

    def spy(source, target):
        seen.append((Path(target).name, sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".tmp")))
        real(source, target)

    monkeypatch.setattr("os.replace", spy)
    _write(prefix, [[4], [5, 6]], manifest={"tokens": 3})
    assert seen == [
        ("x.bin", ["x.bin"]),
        ("x.manifest.json", ["x.bin"]),
        ("x.idx", ["x.bin", "x.manifest.json"]),
    ]


def test_killed_writer_leaves_no_index_and_can_be_run_again(tmp_path):
    code = (
        "import sys, numpy as np; from megalin.data.shards.indexed_dataset import ShardWriter\n"
        "w = ShardWriter(sys.argv[1], np.dtype(np.uint16))\n"
        "for k in range(10**9):\n"
        "    w.add_sequence(np.full(1 << 16, k % 9, np.uint16)); w.end_document()\n"
        "    if k == 40: print('writing', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin.tmp"]
    with pytest.raises(DataError, match="no such file"):
        Shard(tmp_path / "x")
    assert Shard(_write(tmp_path / "x")).num_tokens == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.manifest.json"]
