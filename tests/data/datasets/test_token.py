"""A split as one sequence of tokens: samples, exact document boundaries, held-out documents and every refusal."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megalin.config import parse
from megalin.data.config import DataConfig
from megalin.data.datasets.token import TokenDataset
from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.errors import ConfigError, DataError
from tests.data.shard_files import write_by_hand

VOCAB = 1000


def _config(train, **values):
    values.setdefault("sequence_length", 4)
    return DataConfig(train=[str(prefix) for prefix in train], **values)


def _random_shards(tmp_path, rng, count):
    shards = []
    for number in range(count):
        sequences = [rng.integers(0, VOCAB, rng.integers(0, 8)).tolist() for _ in range(rng.integers(1, 9))]
        shards.append((write_by_hand(tmp_path / f"s{number}", sequences), sequences))
    return shards


def test_samples_are_windows_of_the_tokens_with_exact_boundaries(tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(60):
        shards = _random_shards(tmp_path, rng, int(rng.integers(1, 5)))
        flat, owner = [], []
        for shard, (_, sequences) in enumerate(shards):
            for number, sequence in enumerate(sequences):
                flat += sequence
                owner += [(shard, number)] * len(sequence)
        length = int(rng.integers(1, 9))
        if len(flat) <= length or not all(any(sequences) for _, sequences in shards):
            continue
        config = _config([prefix for prefix, _ in shards], sequence_length=length)
        with TokenDataset.open(config, "train", VOCAB) as dataset:
            assert dataset.num_tokens == len(flat)
            assert dataset.num_samples == (len(flat) - 1) // length
            for sample in range(dataset.num_samples):
                ids, pieces, _ = dataset.window(sample)
                begin = sample * length
                assert ids.tolist() == flat[begin : begin + length + 1]
                owners = owner[begin : begin + length + 1]
                wanted = [0]
                for before, after in itertools.pairwise(owners):
                    wanted.append(wanted[-1] + (before != after))
                assert pieces.tolist() == wanted


def test_many_short_and_empty_sequences_in_a_window(tmp_path, monkeypatch):
    monkeypatch.setattr("megalin.data.datasets.token._PIECE_BLOCK", 3)
    sequences = [[7], [], [], [], [], [8], [], [9, 9, 9], [], [1]]
    prefix = write_by_hand(tmp_path / "x", sequences)
    with TokenDataset.open(_config([prefix], sequence_length=5), "train", VOCAB) as dataset:
        ids, pieces, _ = dataset.window(0)
    assert ids.tolist() == [7, 8, 9, 9, 9, 1]
    assert pieces.tolist() == [0, 1, 2, 2, 2, 3]


def test_boundaries_come_from_the_index_not_from_an_end_of_document_token(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[0, 5, 0], [5, 6, 0]])
    with TokenDataset.open(_config([prefix], sequence_length=5), "train", VOCAB) as dataset:
        batch = dataset.batch(np.array([0]))
    assert batch.labels.tolist() == [[5, 0, -100, 6, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1]]


def test_documents_that_are_not_isolated_run_on(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1, 2], [3, 4, 5]])
    config = _config([prefix], isolate_documents=False)
    with TokenDataset.open(config, "train", VOCAB) as dataset:
        assert dataset.batch(np.array([0])).labels.tolist() == [[2, 3, 4, 5]]


def test_held_out_sequences_are_the_last_of_each_shard(tmp_path):
    first = write_by_hand(tmp_path / "a", [[k, k] for k in range(10)])
    second = write_by_hand(tmp_path / "b", [[20 + k, 20 + k] for k in range(5)])
    config = _config([first, second], validation_fraction=0.4, sequence_length=1)
    with (
        TokenDataset.open(config, "train", VOCAB) as train,
        TokenDataset.open(config, "validation", VOCAB) as validation,
    ):
        assert train.num_tokens + validation.num_tokens == 30
        trained = {int(token) for k in range(train.num_samples) for token in train.window(k)[0]}
        held_out = {int(token) for k in range(validation.num_samples) for token in validation.window(k)[0]}
    assert trained == {0, 1, 2, 3, 4, 5, 20, 21, 22}
    assert held_out == {6, 7, 8, 9, 23, 24}


def test_validation_shards_are_read_whole(tmp_path):
    train = write_by_hand(tmp_path / "a", [[1] * 9])
    other = write_by_hand(tmp_path / "b", [[2] * 5, [3] * 4])
    config = _config([train], validation=[str(other)])
    with TokenDataset.open(config, "validation", VOCAB) as dataset:
        assert dataset.num_tokens == 9
        assert dataset.window(1)[0].tolist() == [2, 3, 3, 3, 3]


def test_empty_shards_are_skipped_with_a_warning(tmp_path, caplog):
    empty, full = write_by_hand(tmp_path / "e", []), write_by_hand(tmp_path / "f", [[1] * 5])
    with TokenDataset.open(_config([empty, full]), "train", VOCAB) as dataset:
        assert dataset.num_samples == 1
    assert "/e: a shard without tokens; skipped" in caplog.text


@pytest.mark.parametrize("sequences", [[], [[], []]])
def test_empty_corpus_is_refused(tmp_path, sequences):
    prefix = write_by_hand(tmp_path / "x", sequences)
    with pytest.raises(DataError, match=r"/x: empty corpus: the train split .* has no tokens; give shards with text"):
        TokenDataset.open(_config([prefix]), "train", VOCAB)


def test_split_that_holds_nothing_out_is_refused(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1] * 50] * 3)
    with pytest.raises(DataError, match=r"empty corpus: the validation split \(validation_fraction = 0.3\)"):
        TokenDataset.open(_config([prefix], validation_fraction=0.3), "validation", VOCAB)


def test_sequence_longer_than_the_data_is_refused_with_numbers_and_remedy(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1] * 8])
    TokenDataset.open(_config([prefix], sequence_length=7), "train", VOCAB).close()
    message = r"sequence_length = 8 needs 9 tokens, but the train split .* has 8; lower sequence_length to at most 7"
    with pytest.raises(DataError, match=message):
        TokenDataset.open(_config([prefix], sequence_length=8), "train", VOCAB)


def test_token_beyond_the_vocabulary_is_refused_in_its_batch_only(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1] * 6, [2, 3, 999, 4]])
    with TokenDataset.open(_config([prefix]), "train", 999) as dataset:
        dataset.batch(np.array([0]))
        message = r"x\.bin: token id 999 at offset 2 of sequence 1; expected ids from 0 to 998: .* vocab_size = 999"
        with pytest.raises(DataError, match=message):
            dataset.batch(np.array([0, 1]))


def test_bad_shard_closes_the_good_ones(tmp_path):
    good = write_by_hand(tmp_path / "g", [[1] * 9])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataError, match=r"missing\.bin: no such file"):
        TokenDataset.open(_config([good, tmp_path / "missing"]), "train", VOCAB)
    assert len(os.listdir("/proc/self/fd")) == before


def test_tokenizer_larger_than_the_model_is_refused(tmp_path):
    config = _config([write_by_hand(tmp_path / "x", [[1] * 9])], tokenizer="bytes")
    with pytest.raises(
        DataError, match="bytes: has 257 token ids, but the model's vocab_size is 256; raise vocab_size"
    ):
        TokenDataset.open(config, "train", 256)


def _manifest(prefix, digest, tokens=9):
    manifest = {"tokens": tokens, "tokenizer": {"digest": digest}}
    Path(f"{prefix}.manifest.json").write_text(json.dumps(manifest))


def test_shard_of_another_tokenizer_is_refused_with_both_digests(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1] * 9])
    config = _config([prefix], tokenizer="bytes")
    _manifest(prefix, ByteTokenizer.digest)
    TokenDataset.open(config, "train", 257).close()
    _manifest(prefix, "feed")
    message = f"/x: made by the tokenizer with sha256 feed, but data.tokenizer = bytes has {ByteTokenizer.digest}"
    with pytest.raises(DataError, match=message):
        TokenDataset.open(config, "train", 257)


def test_manifest_of_another_shard_is_refused(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1] * 9])
    _manifest(prefix, "feed", tokens=8)
    with pytest.raises(DataError, match=r"x\.manifest\.json: expected 9 tokens, as in its shard; found 8; remove it"):
        TokenDataset.open(_config([prefix]), "train", 257)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tokens": 9, "tokenizer": 3}', "\udcff", "[" * 100_000])
def test_broken_manifest_is_refused(tmp_path, text):
    prefix = write_by_hand(tmp_path / "x", [[1] * 9])
    Path(f"{prefix}.manifest.json").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=r"x\.manifest\.json: not a manifest of a shard; remove it"):
        TokenDataset.open(_config([prefix]), "train", 257)


def test_huge_manifest_is_not_read(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1] * 9])
    Path(f"{prefix}.manifest.json").touch()
    os.truncate(f"{prefix}.manifest.json", 2**40)
    with pytest.raises(DataError, match=r"expected at most 67108864 bytes, found 1099511627776"):
        TokenDataset.open(_config([prefix]), "train", 257)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": ["a"], "validation": ["b"], "validation_fraction": 0.1}, "0.1 has no effect with validation"),
        ({"train": ["a", "b"], "validation": ["b"]}, "validation lists the training shard b"),
        ({"train": ["a", "b", "a"]}, "train lists the shard a more than once"),
        ({"train": []}, r"train = \[\]: no training shards; list at least one there, or in sources"),
        ({"train": ["a"], "validation_fraction": 1.0}, "validation_fraction = 1.0"),
        ({"train": ["a"], "sequence_length": 0}, "sequence_length = 0"),
    ],
)
def test_config_that_cannot_work_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(DataConfig, {"sequence_length": 4, **values}, "test")
