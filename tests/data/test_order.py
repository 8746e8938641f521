"""The sample order: a permutation per epoch, determined by seed, epoch and position alone."""

import numpy as np
import pytest

from megalin.data.order import endless, permute

GOLDEN_20 = [18, 2, 4, 6, 17, 3, 12, 11, 5, 13, 14, 16, 7, 15, 9, 0, 10, 19, 8, 1]
GOLDEN_LARGE = [79511478976, 356513930745, 458351909065]


def _epoch(num_samples, seed=0, epoch=0):
    return permute(np.arange(num_samples), num_samples=num_samples, seed=seed, epoch=epoch)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 65536, 65537])
def test_every_epoch_holds_each_sample_once(num_samples):
    for epoch in range(3):
        assert np.array_equal(np.sort(_epoch(num_samples, epoch=epoch)), np.arange(num_samples))


def test_order_is_stable_over_versions():
    assert _epoch(20, seed=0, epoch=0).tolist() == GOLDEN_20
    assert permute(np.array([0, 1, 10**12]), num_samples=10**12 + 7, seed=1234, epoch=5).tolist() == GOLDEN_LARGE


def test_epochs_and_seeds_differ():
    orders = [_epoch(1000, seed=seed, epoch=epoch).tolist() for seed in (0, 1, 2**40) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 9
    for a in range(9):
        for b in range(a):
            assert sum(x == y for x, y in zip(orders[a], orders[b], strict=True)) < 15  # 1 in 1000 by chance


def test_negative_and_large_seeds_are_keys_too():
    assert len({tuple(_epoch(50, seed=seed).tolist()) for seed in (-1, 1, 2**64 + 1)}) == 3


def test_order_has_no_visible_pattern():
    order = _epoch(4096).astype(np.float64)
    steps = np.diff(order)
    assert abs(np.corrcoef(np.arange(4096), order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert len(np.unique(steps)) > 2800  # 2990 by chance


def test_small_epochs_reach_every_arrangement_about_equally():
    counts = {}
    for epoch in range(6000):
        key = tuple(_epoch(3, epoch=epoch).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert max(counts.values()) < 1300  # 1000 expected
    assert min(counts.values()) > 700


def test_endless_order_is_epoch_after_epoch():
    got = endless(np.arange(35), num_samples=10, seed=3)
    parts = [_epoch(10, seed=3, epoch=epoch) for epoch in range(4)]
    assert got.tolist() == np.concatenate(parts)[:35].tolist()


def test_any_part_of_the_order_stands_alone():
    whole = endless(np.arange(200), num_samples=37, seed=9)
    some = np.array([[199, 0], [40, 36]])
    assert endless(some, num_samples=37, seed=9).tolist() == whole[some].tolist()


def test_memory_does_not_grow_with_the_number_of_samples():
    huge = 10**15
    positions = huge - 1 - np.arange(100)
    samples = permute(positions, num_samples=huge, seed=0, epoch=0)
    assert len(np.unique(samples)) == 100
    assert samples.min() >= 0
    assert samples.max() < huge
