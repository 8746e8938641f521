"""Packed samples of whole sequences: every label once, no sequence that fits is cut, no documents are mixed."""

import itertools

import numpy as np
import pytest
import torch

from megalin.data.batch import IGNORED_LABEL
from megalin.data.config import DataConfig
from megalin.data.datasets.packed import PackedDataset
from megalin.errors import DataError
from tests.data.shard_files import write_by_hand

FITS = pytest.mark.parametrize("fit", ["first_fit", "best_fit"])


def _open(tmp_path, shards, *, of="train", **values):
    prefixes = [str(write_by_hand(tmp_path / f"s{number}", shard)) for number, shard in enumerate(shards)]
    config = DataConfig(**{"train": prefixes, "sequence_length": 6, "packing": "best_fit", **values})
    return PackedDataset.open(config, of, 1000)


def _sequences(count, *, seed=0, longest=20):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(0, longest)).tolist() for _ in range(count)]


@FITS
def test_every_pair_of_neighbours_is_learnt_once(tmp_path, monkeypatch, fit):
    monkeypatch.setattr("megalin.data.datasets.packed._WINDOW", 16)
    shards = [_sequences(40), _sequences(1, seed=3), _sequences(70, seed=2)]
    with _open(tmp_path, shards, packing=fit) as dataset:
        batch = dataset.batch(np.arange(dataset.num_samples))
    learnt = sorted(
        zip(batch.tokens[batch.labels >= 0].tolist(), batch.labels[batch.labels >= 0].tolist(), strict=True)
    )
    wanted = [pair for shard in shards for ids in shard for pair in itertools.pairwise(ids)]
    assert learnt == sorted(wanted)
    assert dataset.num_targets == len(wanted)
    empty = (batch.labels == IGNORED_LABEL).float().mean().item()
    assert dataset.empty_fraction == pytest.approx(empty)


@FITS
def test_a_document_of_a_sample_is_one_run_of_one_sequence(tmp_path, fit):
    shard = _sequences(60)
    runs = {tuple(ids[k : k + 7]) for ids in shard for k in range(0, max(1, len(ids) - 1), 6)}
    with _open(tmp_path, [shard], packing=fit) as dataset:
        batch = dataset.batch(np.arange(dataset.num_samples))
    for tokens, labels, documents in zip(batch.tokens, batch.labels, batch.document_ids, strict=True):
        assert (documents.diff() >= 0).all()
        for number in documents.unique():
            inside = documents == number
            if (labels[inside] == IGNORED_LABEL).all():
                assert not tokens[inside].any()
            else:
                assert (*tokens[inside].tolist(), labels[inside][-1].item()) in runs


@FITS
def test_a_sample_is_a_function_of_its_number(tmp_path, monkeypatch, fit):
    monkeypatch.setattr("megalin.data.datasets.packed._WINDOW", 8)
    with _open(tmp_path, [_sequences(50), [[1]], _sequences(30, seed=1)], packing=fit) as dataset:
        whole = dataset.batch(np.arange(dataset.num_samples))
        some = np.array([dataset.num_samples - 1, 0, 3])
        for name, field in dataset.batch(some)._asdict().items():
            expected = getattr(whole, name)
            assert field is expected is None or torch.equal(field, expected[some]), name


def test_windows_that_are_packed_again_give_the_same_samples(tmp_path, monkeypatch):
    monkeypatch.setattr("megalin.data.datasets.packed._WINDOW", 8)
    shards = [_sequences(50), _sequences(30, seed=1)]
    with _open(tmp_path, shards) as kept:
        samples = np.random.default_rng(0).integers(0, kept.num_samples, 40)
        wanted = [kept.batch(samples), kept.batch(samples[::-1].copy())]
    monkeypatch.setattr("megalin.data.datasets.packed._KEPT_PIECES", 20)
    with _open(tmp_path, shards) as dataset:
        for one in wanted:
            found = dataset.batch(one.sample_ids.numpy())
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, one, strict=True))
        assert 0 < sum(len(window.pieces) for window in dataset._windows._kept.values()) <= 20


def test_long_samples_are_nearly_full(tmp_path):
    shards = [_sequences(2000, longest=60)]
    empty = {}
    for fit in ("first_fit", "best_fit"):
        with _open(tmp_path, shards, packing=fit, sequence_length=64) as dataset:
            empty[fit] = dataset.empty_fraction
    assert max(empty.values()) < 0.01


def test_held_out_sequences_are_packed_by_themselves(tmp_path):
    shard = [[number] * 4 for number in range(10)]
    for split, wanted in (("train", range(8)), ("validation", range(8, 9)), ("test", range(9, 10))):
        with _open(tmp_path, [shard], of=split, split=[80, 10, 10]) as dataset:
            batch = dataset.batch(np.arange(dataset.num_samples))
            assert set(batch.labels[batch.labels >= 0].tolist()) == set(wanted)


def test_corpus_without_a_pair_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no sequence of the train split .* has two tokens or more \(2 in all"):
        _open(tmp_path, [[[1], [2]]])
    with pytest.raises(DataError, match="empty corpus: the train split"):
        _open(tmp_path, [[]])


def test_token_beyond_the_vocabulary_is_refused(tmp_path):
    with (
        _open(tmp_path, [[[1, 2], [3, 1001, 4]]]) as dataset,
        pytest.raises(DataError, match="token id 1001 at offset 1 of sequence 1"),
    ):
        dataset.batch(np.arange(1))
