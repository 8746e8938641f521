"""The compiled index functions against plain Python: samples, checks of an index, and packing."""

import numpy as np
import pytest

from megalin._index import build_sample_index, check_documents, check_lengths, count_rows, pack_window


def test_samples_agree_with_a_walk_over_the_tokens():
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
def test_samples_outside_the_tokens_are_refused_before_allocating(first_token, stride, count):
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


def _unaligned(values, dtype):
    return np.frombuffer(b"x" + np.array(values, dtype).tobytes(), dtype, offset=1)


@pytest.mark.parametrize(
    ("lengths", "pointers", "found"),
    [
        ([3, 0, 2], [0, 6, 6], (3, 5)),
        ([], [], (0, 0)),
        ([3, 0, 2], [0, 6, 7], (2, 3)),
        ([3, -1, 2], [0, 6, 4], (1, 3)),
        ([3, 2], [1, 6], (0, 0)),
        ([2**31 - 1] * 3, [0, 2**32 - 2, 2**33 - 4], (3, 3 * (2**31 - 1))),
    ],
)
def test_first_wrong_sequence_is_found(lengths, pointers, found):
    assert check_lengths(_unaligned(lengths, np.int32), _unaligned(pointers, np.int64), itemsize=2) == found


@pytest.mark.parametrize(("entries", "found"), [([0, 0, 2], 3), ([0, 2, 1], 2), ([-1, 0], 0), ([0], 1)])
def test_first_decreasing_document_is_found(entries, found):
    assert check_documents(_unaligned(entries, np.int64)) == found


def test_index_arrays_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="lengths and pointers must have as many entries"):
        check_lengths(np.ones(2, np.int32), np.ones(3, np.int64), itemsize=2)


def _packed(lengths, capacity, fit):
    """Packed rows as lists of (sequence, offset, size), by a search of all rows for each piece."""
    pieces = []
    for sequence, length in enumerate(lengths):
        for offset in range(0, length - 1, capacity):
            pieces.append((sequence, offset, min(capacity, length - 1 - offset)))
    rows: list[list[tuple[int, int, int]]] = []
    for piece in sorted(pieces, key=lambda piece: -piece[2]):
        room = {number: capacity - sum(size for *_, size in row) for number, row in enumerate(rows)}
        fitting = [number for number in room if room[number] >= piece[2]]
        if not fitting:
            rows.append([piece])
        elif fit == "first_fit":
            rows[fitting[0]].append(piece)
        else:
            rows[min(fitting, key=lambda number: (room[number], number))].append(piece)
    return rows


@pytest.mark.parametrize("fit", ["first_fit", "best_fit"])
def test_packed_rows_are_those_of_the_plain_rule(fit):
    rng = np.random.default_rng(0)
    for _ in range(60):
        lengths = _unaligned(rng.integers(0, 30, rng.integers(1, 40)), np.int32)
        capacity = int(rng.integers(1, 20))
        wanted = _packed(lengths.tolist(), capacity, fit)
        assert count_rows(lengths, capacity=capacity, window=len(lengths), fit=fit).tolist() == [len(wanted)]
        pieces, first = pack_window(lengths, capacity=capacity, fit=fit)
        rows = [pieces[first[row] : first[row + 1]].tolist() for row in range(len(first) - 1)]
        assert [[tuple(piece) for piece in row] for row in rows] == wanted


def test_windows_are_packed_separately():
    lengths = np.array([4, 4, 4, 4, 4], np.int32)
    assert count_rows(lengths, capacity=6, window=2, fit="best_fit").tolist() == [1, 1, 1]
    assert count_rows(lengths, capacity=6, window=3, fit="first_fit").tolist() == [2, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"capacity": 0}, "capacity and window must be at least 1"),
        ({"capacity": 2**31}, "capacity below 2"),
        ({"window": 0}, "capacity and window must be at least 1"),
        ({"fit": "worst_fit"}, "fit must be first_fit or best_fit, not worst_fit"),
    ],
)
def test_packing_that_makes_no_sense_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        count_rows(np.ones(3, np.int32), **{"capacity": 4, "window": 2, "fit": "first_fit", **values})
