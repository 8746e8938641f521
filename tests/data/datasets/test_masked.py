"""Sentence pairs from shards: coverage of every document, the source of each segment, and bad input."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from megalin.config import parse
from megalin.data.batch import EncoderBatch
from megalin.data.blend import BlendedOrder, BlendSource, Phase
from megalin.data.config import DataConfig
from megalin.data.datasets.masked import MaskedDataset
from megalin.data.loader import Loader, ValidationLoader
from megalin.data.sources import open_dataset
from megalin.errors import ConfigError, DataError
from megalin.parallel.cross_entropy import IGNORED_LABEL
from tests.data.shard_files import write_by_hand

VOCAB_SIZE, LENGTH = 2000, 13
MASKING = {"cls_token": 1990, "sep_token": 1991, "mask_token": 1992, "pad_token": 1993, "max_predictions": 3}
SIZES = [25, 2, 10, 0, 11, 1, 37, 5]
"""Sizes of documents in tokens; at 10 text tokens a sample they give 3, 1, 1, -, 2, -, 4 and 1 pieces."""


def document(number: int, size: int) -> list[int]:
    return [100 * number + place for place in range(size)]


def write(tmp_path, sizes=SIZES, name="x"):
    return write_by_hand(tmp_path / name, [document(number, size) for number, size in enumerate(sizes)])


def open_masked(prefix, split="train", *, seed=0, length=LENGTH, masking=None, **fields) -> MaskedDataset:
    table = {"train": [str(prefix)], "sequence_length": length, "masking": MASKING | (masking or {})}
    dataset = open_dataset(parse(DataConfig, table | fields, "test"), split, VOCAB_SIZE, seed)
    assert isinstance(dataset, MaskedDataset)
    return dataset


@pytest.fixture
def dataset(tmp_path, caplog):
    with open_masked(write(tmp_path), masking={"copies": 4}) as opened:
        assert "2 documents of the train split have fewer than 2 tokens and are skipped" in caplog.text
        yield opened


def segments(batch: EncoderBatch, row: int) -> tuple[list[int], list[int]]:
    """Segments A and B before masking."""
    tokens, kept = batch.tokens[row].clone(), batch.masked_labels[row] != IGNORED_LABEL
    tokens[batch.masked_positions[row][kept]] = batch.masked_labels[row][kept]
    ends = (tokens == 1991).nonzero().flatten().tolist()
    assert tokens[0] == 1990
    assert (tokens[ends[1] + 1 :] == 1993).all()
    assert torch.equal(batch.valid[row], torch.arange(LENGTH) <= ends[1])
    return tokens[1 : ends[0]].tolist(), tokens[ends[0] + 1 : ends[1]].tolist()


def test_every_piece_of_every_document_is_read_copies_times(dataset):
    assert dataset.num_samples == 4 * 12
    assert dataset.num_skipped == 2
    batch = dataset.batch(np.arange(dataset.num_samples))
    seen: Counter[int] = Counter()
    for row in range(dataset.num_samples):
        first, second = segments(batch, row)
        assert first
        assert second
        assert len(first) + len(second) <= 10
        if batch.sequence_labels[row] == 0:
            whole = first + second
            assert whole == list(range(whole[0], whole[0] + len(whole)))
            seen.update(whole)
        else:
            assert first[0] // 100 != second[0] // 100
            assert second == list(range(second[0], second[0] + len(second)))
    with open_masked(dataset._documents.shards[0].prefix, masking={"copies": 4, "other_document_share": 0.0}) as plain:
        whole = plain.batch(np.arange(plain.num_samples))
    tokens = Counter(t for row in range(48) for segment in segments(whole, row) for t in segment)
    expected = {t: 4 for number, size in enumerate(SIZES) if size > 1 for t in document(number, size)}
    assert tokens == expected


def test_half_of_the_pairs_come_from_two_documents(tmp_path):
    with open_masked(write(tmp_path, [50] * 15), masking={"copies": 30}) as dataset:
        batch = dataset.batch(np.arange(dataset.num_samples))
        boundaries = Counter(len(segments(batch, row)[0]) for row in range(len(batch.tokens)))
    assert batch.sequence_labels.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert set(boundaries) == set(range(1, 10))  # the boundary may lie at any token
    assert min(boundaries.values()) > 0.7 * max(boundaries.values())


def test_sample_is_a_function_of_seed_and_number(tmp_path):
    prefix = write(tmp_path, [50] * 4)
    with open_masked(prefix) as a, open_masked(prefix) as b, open_masked(prefix, seed=1) as c:
        order = np.random.default_rng(0).permutation(a.num_samples)
        whole, picked, other = a.batch(np.arange(a.num_samples)), b.batch(order), c.batch(np.arange(a.num_samples))
        for x, y, z in zip(whole[:6], picked[:6], other[:6], strict=True):
            assert torch.equal(x[order], y)
            assert x is whole.valid or not torch.equal(x, z)


def test_copies_of_a_piece_are_masked_in_their_own_ways(tmp_path):
    with open_masked(write(tmp_path, [10, 10]), masking={"copies": 20}) as dataset:
        batch = dataset.batch(np.arange(20))
    assert len({tuple(row) for row in batch.masked_positions.tolist()}) > 10


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 8), (2, 4), (4, 2), (2, 1)])
def test_every_mesh_reads_the_same_samples_and_a_resumed_one_goes_on(tmp_path, dp_size, micro_batch_size):
    def loaders(size, micro):
        order = BlendedOrder([BlendSource("train", dataset.num_samples)], [Phase(0, [1.0])], seed=3)
        return [
            Loader(dataset, order, global_batch_size=8, micro_batch_size=micro, dp_rank=rank, dp_size=size)
            for rank in range(size)
        ]

    with open_masked(write(tmp_path, [50] * 9), masking={"copies": 2}) as dataset:
        (whole,) = loaders(1, 8)
        wanted = [whole.step(step).batches[0] for step in range(14)]
        parts = loaders(dp_size, micro_batch_size)
        for step in (9, 10, 13, 2):
            of_ranks = [loader.step(step).batches for loader in parts]
            batches = [batch for micro in zip(*of_ranks, strict=True) for batch in micro]
            for field, expected in zip(zip(*batches, strict=True), wanted[step], strict=True):
                assert torch.equal(torch.cat(field), expected)
        for loader in [whole, *parts]:
            loader.close()


def test_validation_reads_each_piece_once_and_pads_batches(tmp_path):
    fields = {"validation_fraction": 0.5, "masking": {"copies": 7}}
    with open_masked(write(tmp_path, [30] * 6), "validation", **fields) as dataset:
        assert dataset.num_samples == 9
        batches = [
            batch for rank in (0, 1) for batch in ValidationLoader(dataset, micro_batch_size=4, dp_rank=rank, dp_size=2)
        ]
    ids = torch.cat([batch.sample_ids for batch in batches])
    assert sorted(ids.tolist()) == [-1] * 7 + list(range(9))
    for batch in batches:
        padding = batch.sample_ids == -1
        assert (batch.masked_labels[padding] == IGNORED_LABEL).all()
        assert (batch.sequence_labels[padding] == IGNORED_LABEL).all()
        assert not batch.valid[padding].any()
        assert batch.label_counts()[1] == (~padding).sum()


def test_documents_of_several_sequences_and_shards(tmp_path):
    """The sentences of a document are concatenated; a document without a sequence is empty, also at the end."""
    sentences = [document(0, 30)[:7], document(0, 30)[7:30], document(1, 12), document(2, 1)]
    first = write_by_hand(tmp_path / "a", sentences, documents=[0, 2, 2, 3, 4, 4])
    second = write_by_hand(tmp_path / "b", [document(7, 20)])
    masking = {"other_document_share": 0.0, "copies": 1}
    with open_masked(first, train=[str(first), str(second)], masking=masking) as dataset:
        assert dataset.num_skipped == 3
        batch = dataset.batch(np.arange(dataset.num_samples))
        pieces = [[*itertools.chain(*segments(batch, row))] for row in range(dataset.num_samples)]
    assert [len(piece) for piece in pieces] == [10, 10, 10, 6, 6, 10, 10]
    assert [*itertools.chain(*pieces)] == document(0, 30) + document(1, 12) + document(7, 20)


def test_corpus_without_usable_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"empty corpus: the train split.*no document of at least 2 tokens \(3 are sho"):
        open_masked(write(tmp_path, [1, 0, 1]))
    with pytest.raises(DataError, match=r"other_document_share = 0\.5 needs two documents, but the train split.* has"):
        open_masked(write(tmp_path, [9], "one"))
    with open_masked(tmp_path / "one", masking={"other_document_share": 0.0}) as dataset:
        assert dataset.num_samples == 10


def test_token_beyond_the_vocabulary_is_named(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1, 2, 3, 4], [5, 6, 7, 2000]])
    masking = {"copies": 1, "other_document_share": 0.0}
    with open_masked(prefix, masking=masking) as dataset, pytest.raises(DataError, match="2000"):
        dataset.batch(np.arange(2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 5}, "sequence_length = 5 has no room for .* use at least 6"),
        ({"masking": {"max_predictions": 11}}, "masking.max_predictions = 11 is more than the 10 tokens of text"),
        ({"isolate_documents": False}, "isolate_documents = false has no effect with masking; remove it"),
        ({"masking": {"mask_token": "[MASK]"}}, "mask_token = '.MASK.' is a name, but data.tokenizer is not set"),
        ({"masking": {"mask_token": 2000}}, "model.vocab_size = 2000; raise it to 2001"),
    ],
)
def test_bad_config_is_refused(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        open_masked(write(tmp_path, [20, 20]), **fields)
