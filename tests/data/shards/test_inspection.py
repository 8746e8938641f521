"""Summary of a shard, and the scan of its token ids."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from megalin.data.shards.indexed_dataset import ShardWriter
from megalin.data.shards.inspection import LengthSummary, digest, inspect_shard, validate_shard
from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.errors import DataError
from tests.data.shard_files import mask_bytes, write_by_hand


def test_summary_holds_the_facts(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[104, 105], [], [33, 256, 104, 104]], [0, 1, 1, 3])
    summary = inspect_shard(prefix, ByteTokenizer())
    assert (summary.documents, summary.sequences, summary.tokens, summary.dtype) == (3, 3, 6, "uint16")
    assert summary.lengths == LengthSummary(0, 2.0, 2.0, 4)
    assert summary.first_tokens == [104, 105, 33, 256, 104, 104]
    assert summary.first_text == "hi!<|endoftext|>hh"
    assert summary.digest == digest(prefix)


def test_summary_counts_the_labels_of_a_mask(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1, 2, 3], [4, 5]])
    assert inspect_shard(prefix)[-3:] == (None, None, None)
    Path(f"{prefix}.mask.bin").write_bytes(mask_bytes([0, 1, 1, 0, 1]))
    summary = inspect_shard(prefix)
    assert (summary.label_tokens, summary.label_fraction) == (3, 0.6)
    assert summary.label_mask_digest == hashlib.sha256(mask_bytes([0, 1, 1, 0, 1])).hexdigest()
    Path(f"{prefix}.mask.bin").write_bytes(mask_bytes([1] * 6))
    with pytest.raises(
        DataError, match=r"x\.mask\.bin: expected the mask of 5 tokens, as in its shard; found one of 6"
    ):
        inspect_shard(prefix)


def test_first_tokens_are_few_and_undecoded_without_a_tokenizer(tmp_path):
    summary = inspect_shard(write_by_hand(tmp_path / "x", [[7] * 1000]))
    assert summary.first_tokens == [7] * 64
    assert summary.first_text is None


def test_empty_shard_has_no_lengths(tmp_path):
    summary = inspect_shard(write_by_hand(tmp_path / "x", []))
    assert (summary.documents, summary.tokens, summary.lengths, summary.first_tokens) == (0, 0, None, [])


def test_first_tokens_of_another_tokenizer_are_refused(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[104, 257]])
    with pytest.raises(DataError, match="token id 257 at offset 1 of sequence 0; expected ids from 0 to 256"):
        inspect_shard(prefix, ByteTokenizer())


@pytest.mark.parametrize("bad", [9, -1])
def test_scan_finds_a_bad_id_in_any_block(tmp_path, monkeypatch, bad):
    monkeypatch.setattr("megalin.data.shards.inspection._SCAN_TOKENS", 4)
    with ShardWriter(tmp_path / "x", np.dtype(np.int32)) as writer:
        for _ in range(5):
            writer.add_sequence([1, 2, 8])
            writer.end_document()
        writer.publish()
    assert validate_shard(tmp_path / "x", vocab_size=9) == 15
    tokens = np.fromfile(tmp_path / "x.bin", "<i4")
    tokens[13] = bad
    tokens.tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=rf"x\.bin: token id {bad} at offset 1 of sequence 4; expected ids from 0 to 8"):
        validate_shard(tmp_path / "x", vocab_size=9)
