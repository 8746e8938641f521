"""Blend of sources: fractions kept at every position, random access, and phases that continue each source."""

import numpy as np
import pytest

from megalin.data.blend import BlendedOrder, BlendSource, Phase
from megalin.data.order import endless

ALL = np.arange(3000, dtype=np.int64)
GOLDEN = [92, 118, 65, 117, 12, 58, 169, 87, 120, 73]
GOLDEN_LARGE = 60000002384


def _order(weights, sizes=None, seed=3, phases=()):
    sizes = sizes or [100 * (number + 1) for number in range(len(weights))]
    sources = [BlendSource(f"s{number}", size) for number, size in enumerate(sizes)]
    return BlendedOrder(sources, [Phase(0, weights), *phases], seed=seed)


@pytest.mark.parametrize(
    "weights",
    [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [5.0, 0.0, 2.0, 1e-4], [*range(1, 12)], [1e9, 1.0, 1.0], [1.0, 1e-20, 1e-20]],
)
def test_no_source_is_ever_far_from_its_fraction(weights):
    sources, ranks = _order(weights).sources(ALL)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)  # [positions, sources]
    wanted = (ALL + 1)[:, None] * np.array(weights) / sum(weights)
    levels = np.ceil(np.log2(np.count_nonzero(weights)))
    assert np.abs(counts - wanted).max() <= levels / 2 + 1e-2
    assert ranks.tolist() == [row[source] - 1 for row, source in zip(counts.tolist(), sources.tolist(), strict=True)]


def test_counts_are_those_of_the_positions():
    phases = [Phase(500, [0.0, 1.0, 4.0]), Phase(1700, [3.0, 1.0, 0.0])]
    order = _order([1.0, 2.0, 0.0], phases=phases)
    sources, _ = order.sources(ALL)
    for positions in (0, 1, 499, 500, 501, 1700, 2999):
        assert order.counts(positions).tolist() == np.bincount(sources[:positions], minlength=3).tolist()


def test_any_position_is_read_without_those_before_it():
    order = _order([0.6, 0.3, 0.1], phases=[Phase(1000, [0.1, 0.1, 0.8])])
    whole = order.samples(ALL)
    some = np.array([[2999, 0], [1000, 999]])
    assert order.samples(some).tolist() == whole[some].tolist()


def test_each_source_is_read_in_its_own_order_over_all_phases():
    sizes = [100, 40, 70]
    order = _order([0.6, 0.4, 0.0], sizes, phases=[Phase(250, [0.2, 0.0, 0.8]), Phase(600, [1.0, 1.0, 1.0])])
    sources, samples = order.sources(ALL)[0], order.samples(ALL)
    for number, (first, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
        own = samples[sources == number] - first
        wanted = endless(np.arange(own.size), num_samples=size, seed=3, source=f"s{number}")
        assert own.tolist() == wanted.tolist()


def test_a_phase_and_a_source_that_come_later_change_nothing_before():
    order = _order([0.6, 0.4], [100, 40])
    longer = _order([0.6, 0.4, 0.0], [100, 40, 70], phases=[Phase(800, [0.2, 0.0, 0.8])])
    assert order.samples(ALL[:800]).tolist() == longer.samples(ALL[:800]).tolist()
    assert order.samples(ALL[800:]).tolist() != longer.samples(ALL[800:]).tolist()


def test_a_single_source_named_train_is_the_order_without_sources():
    order = BlendedOrder([BlendSource("train", 90)], [Phase(0, [1.0])], seed=3)
    assert order.samples(ALL).tolist() == endless(ALL, num_samples=90, seed=3).tolist()


def test_sources_of_equal_size_have_orders_of_their_own():
    order = _order([1.0, 1.0], [500, 500])
    sources, samples = order.sources(ALL)[0], order.samples(ALL)
    assert samples[sources == 0].tolist() != (samples[sources == 1] - 500).tolist()


def test_order_of_a_blend_is_stable_over_versions():
    order = _order([0.6, 0.3, 0.1], [100, 40, 70])
    assert order.samples(np.arange(10)).tolist() == GOLDEN
    assert order.sources(np.array([10**11]))[1].tolist() == [GOLDEN_LARGE]
