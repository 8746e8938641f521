"""The compiled sample index against a plain walk over the tokens."""

import numpy as np
import pytest

from megalin._index import build_sample_index


def test_rows_agree_with_a_walk_over_the_tokens():
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(0, 7, rng.integers(1, 20)).astype(np.int32)
        owners = [(k, offset) for k, length in enumerate(lengths) for offset in range(length)]
        if not owners:
            continue
        first, stride = int(rng.integers(0, len(owners))), int(rng.integers(1, 9))
        wanted = owners[first::stride]
        sequences, offsets = build_sample_index(lengths, first_token=first, stride=stride, count=len(wanted))
        assert list(zip(sequences.tolist(), offsets.tolist(), strict=True)) == wanted
        assert sequences.dtype == offsets.dtype == np.int32


def test_unaligned_lengths_are_read():
    data = b"xx" + np.array([3, 2], np.int32).tobytes()
    sequences, offsets = build_sample_index(np.frombuffer(data, np.int32, offset=2), first_token=2, stride=2, count=2)
    assert (sequences.tolist(), offsets.tolist()) == ([0, 1], [2, 1])


def test_no_samples_need_no_tokens():
    sequences, _ = build_sample_index(np.empty(0, np.int32), first_token=0, stride=1, count=0)
    assert sequences.size == 0


@pytest.mark.parametrize(
    ("first_token", "stride", "count"),
    [
        (0, 1, 6),
        (5, 1, 1),
        (-1, 1, 1),
        (0, 0, 2),
        (0, -1, 2),
        (0, 1, -1),
        (4, 2**62, 2),
        (0, 2**62, 2**62),
        (0, 1, 2**62),
    ],
)
def test_rows_outside_the_tokens_are_refused_before_allocating(first_token, stride, count):
    with pytest.raises(ValueError, match="do not lie inside 5 tokens"):
        build_sample_index(np.array([3, 2], np.int32), first_token=first_token, stride=stride, count=count)


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="sequence 1 has the negative length -2"):
        build_sample_index(np.array([3, -2], np.int32), first_token=0, stride=1, count=1)


@pytest.mark.parametrize("lengths", [np.array([3], np.int64), np.array([1, 2, 3, 4], np.int32)[::2]])
def test_other_arrays_are_refused_rather_than_copied(lengths):
    with pytest.raises(TypeError):
        build_sample_index(lengths, first_token=0, stride=1, count=1)


def test_matrices_are_refused():
    with pytest.raises(ValueError, match="one-dimensional"):
        build_sample_index(np.ones((2, 2), np.int32), first_token=0, stride=1, count=1)
