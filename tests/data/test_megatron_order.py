"""Megatron-LM's sample and blend order: golden values from its own code, and its rules in plain Python."""

import numpy as np
import pytest

from megalin._index import build_blend
from megalin.data.order import megatron_blend, megatron_order
from megalin.errors import DataError

LENGTHS = np.array([5, 0, 3, 7, 1, 4], np.int32)
ALL = np.arange(6, dtype=np.int32)


def test_one_epoch_is_megatrons():
    found = megatron_order(LENGTHS, np.array([0, 1, 2, 3, 5]), 4, None, 7)
    assert found.document_index.tolist() == [0, 3, 2, 1, 5]
    assert found.sample_index.tolist() == [[0, 0], [0, 4], [1, 3], [2, 0], [4, 1]]
    assert found.shuffle_index.tolist() == [2, 1, 0, 3]
    assert [x.dtype for x in found] == [np.int32, np.int32, np.uint32]


def test_last_epoch_apart_is_megatrons():
    found = megatron_order(LENGTHS, ALL, 4, 11, 7)
    assert found.document_index.tolist() == [1, 4, 2, 5, 0, 1, 5, 2, 3, 0, 3, 4, 1, 4, 5, 3, 0, 2]
    assert found.sample_index[-4:].tolist() == [[14, 3], [15, 3], [16, 0], [16, 4]]
    assert found.shuffle_index.tolist() == [1, 5, 2, 6, 3, 8, 4, 7, 0, 11, 10, 13, 9, 12]


def test_order_without_the_extra_token_is_megatrons():
    found = megatron_order(LENGTHS, ALL, 3, 8, 7, extra_token=0)
    assert found.document_index.tolist() == [3, 5, 0, 2, 1, 4, 4, 5, 3, 2, 1, 0]
    assert found.sample_index[:5].tolist() == [[0, 0], [0, 3], [0, 6], [1, 2], [2, 1]]
    assert found.shuffle_index.tolist() == [1, 2, 3, 5, 4, 0, 11, 7, 10, 6, 12, 8, 9]


@pytest.mark.parametrize("extra", [0, 1])
def test_samples_tile_the_tokens_laid_end_to_end(extra: int):
    rng = np.random.default_rng(extra)
    for seed in range(100):
        lengths = rng.integers(0, 9, rng.integers(2, 12)).astype(np.int32) + (np.arange(1) == 0)
        ids = np.arange(len(lengths), dtype=np.int32)
        seq_length = int(rng.integers(1, 8))
        found = megatron_order(lengths, ids, seq_length, int(rng.integers(1, 40)), seed, extra)
        ends = np.cumsum(lengths[found.document_index])
        assert sorted(found.document_index.tolist()) == sorted(ids.tolist() * (len(found.document_index) // len(ids)))
        begins = [ends[row] - lengths[found.document_index[row]] + offset for row, offset in found.sample_index]
        assert begins == [sample * seq_length for sample in range(len(begins))]
        assert len(begins) - 1 == (ends[-1] - extra) // seq_length
        assert sorted(found.shuffle_index.tolist()) == list(range(len(begins) - 1))


def test_a_last_epoch_of_which_little_is_needed_stays_behind_the_others():
    lengths = np.full(50, 10, np.int32)
    before_last = (500 - 1) // 5
    for samples, apart in ((before_last + 79, False), (before_last + 78, True)):
        found = megatron_order(lengths, np.arange(50), 5, samples, seed=1)
        assert len(found.document_index) == 100
        assert (found.shuffle_index[:before_last].max() < before_last) == apart


@pytest.mark.parametrize(
    ("ids", "seq_length", "samples", "message"),
    [
        ([0, 6], 4, 1, r"documents 0 to 6 of a shard with 6; ids must be lower"),
        ([1], 4, 1, r"1 documents of 0 tokens are too few for a sample of 5"),
        ([], 4, 1, r"0 documents of 0 tokens"),
        ([2], 4, None, r"1 documents of 3 tokens are too few for a sample of 5; lower seq_length"),
        (
            [4],
            4,
            2**30,
            r"epochs of 1 documents are more than Megatron-LM's order can number \(2147483647\)",
        ),
    ],
)
def test_bad_splits_are_refused(ids: list[int], seq_length: int, samples: int | None, message: str):
    with pytest.raises(DataError, match=message):
        megatron_order(LENGTHS, np.array(ids, np.int32), seq_length, samples, seed=0)


def test_blend_is_megatrons():
    sources, samples = megatron_blend([0.3, 0.2, 0.5], 12)
    assert sources.tolist() == [2, 0, 1, 2, 0, 2, 1, 2, 0, 2, 0, 2]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 3, 5]
    assert (sources.dtype, samples.dtype) == (np.int16, np.int64)


def test_blend_of_everything_is_megatrons():
    sources, samples = megatron_blend([1, 5, 3], None)
    assert sources.tolist() == [1, 2, 0, 1, 2, 1, 1, 2, 1]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 3, 2, 4]


def test_blend_stays_within_one_sample_of_its_weights():
    weights = np.array([5.0, 1.0, 2.5, 0.01])
    sources, samples = megatron_blend(weights, 3000)
    for steps in range(1, 3001, 7):
        counts = np.bincount(sources[:steps], minlength=4)
        assert np.abs(counts - steps * weights / weights.sum()).max() < 1.5
    for source in range(4):
        assert samples[sources == source].tolist() == list(range((sources == source).sum()))


@pytest.mark.parametrize(
    ("weights", "size", "message"),
    [
        ([], 3, r"a blend of 0 datasets; use 1 to 32767"),
        ([1.0] * 32768, 3, r"a blend of 32768 datasets"),
        ([0.5, 0.0], 3, r"weight 1 of the blend is 0\.0; weights must be positive"),
        ([float("nan")], 3, r"weight 0 of the blend is nan"),
        ([3, 2.5], None, r"weight 1 of the blend is 2\.5; without a size, weights must be whole lengths"),
    ],
)
def test_bad_blends_are_refused(weights: list[float], size: int | None, message: str):
    with pytest.raises(DataError, match=message):
        megatron_blend(weights, size)


def test_compiled_blend_refuses_what_would_overrun_a_source():
    with pytest.raises(ValueError, match="5 samples of sources that hold 4"):
        build_blend(np.ones(2), np.array([1, 3]), 5)
    with pytest.raises(ValueError, match="one each for 1 to 32767 sources"):
        build_blend(np.ones(2), np.array([1]), 1)
