"""Blend of sources in closed form: the source and the sample of each position of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megalin.data.config import ONLY_SOURCE
from megalin.data.order import Positions, endless

_UNIT_BITS = 24
_UNIT = 1 << _UNIT_BITS
_MOST_POSITIONS = 1 << (63 - _UNIT_BITS - 1)


class BlendSource(NamedTuple):
    """Name and size of a source in a blend."""

    name: str
    num_samples: int


class Phase(NamedTuple):
    """Sampling weights from a position of the run on."""

    first_position: int
    weights: list[float]
    """One per source, not negative; 0: not sampled."""


class BlendedOrder:
    """Stateless blend: maps position p of a run to a sample; samples are numbered one source after the other.

    A phase distributes its positions down a balanced binary tree over its sources in their order: of the first k that
    reach a node, floor(k s + 1/2) go left, s the left side's fraction of the node's weight, a multiple of 2^-24. The
    source of a position and the number of its earlier positions are arithmetic: nothing is stored, and no source is off
    its weight by more than half a sample for each level of the tree. The k-th position of a source in the run, over all
    phases, reads its sample `endless(k)`, so no phase repeats a sample that another has read in the same epoch.
    """

    def __init__(self, sources: Sequence[BlendSource], phases: Sequence[Phase], *, seed: int) -> None:
        """Takes phases that begin at rising positions, the first at 0."""
        assert phases[0].first_position == 0, phases
        self._sources, self._seed = list(sources), seed
        self._firsts = np.array([phase.first_position for phase in phases], np.int64)
        assert (np.diff(self._firsts) > 0).all(), phases
        self._trees = [_WeightTree(phase.weights) for phase in phases]
        sizes = [source.num_samples for source in sources]
        self._first_samples = np.cumsum([0, *sizes[:-1]], dtype=np.int64)

    def sources(self, positions: Positions) -> tuple[Positions, Positions]:
        """Source of each position (>= 0, any shape, int64) and its number of earlier positions in the run."""
        assert positions.size == 0 or 0 <= positions.min() <= positions.max() < _MOST_POSITIONS, positions
        sources, ranks = np.empty_like(positions), np.empty_like(positions)
        phases = np.searchsorted(self._firsts, positions, side="right") - 1
        for phase in np.unique(phases):
            chosen = phases == phase
            inside, within = self._trees[phase].sources(positions[chosen] - self._firsts[phase])
            sources[chosen] = inside
            ranks[chosen] = within + self.counts(int(self._firsts[phase]))[inside]
        return sources, ranks

    def counts(self, positions: int) -> Positions:
        """Samples of each source in the first `positions` of the run, [sources]."""
        total = np.zeros(len(self._sources), np.int64)
        ends = [*self._firsts[1:].tolist(), positions]
        for first, end, tree in zip(self._firsts.tolist(), ends, self._trees, strict=True):
            total += tree.counts(max(0, min(end, positions) - first))
        return total

    def samples(self, positions: Positions) -> Positions:
        """Samples at `positions` (>= 0, any shape, int64) of the endless run."""
        sources, ranks = self.sources(positions)
        samples = np.empty_like(positions)
        for number in np.unique(sources):
            source, chosen = self._sources[number], sources == number
            key = "" if source.name == ONLY_SOURCE else source.name
            own = endless(ranks[chosen], num_samples=source.num_samples, seed=self._seed, source=key)
            samples[chosen] = own + self._first_samples[number]
        return samples


class _WeightTree:
    """Binary tree that distributes the positions of one phase over the sources with a weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._num_sources = len(weights)
        self._used = [number for number, weight in enumerate(weights) if weight > 0]
        assert self._used, weights
        sums = np.cumsum([0.0, *(weights[number] for number in self._used)])
        self._sums = sums / sums[-1]

    def sources(self, positions: Positions) -> tuple[Positions, Positions]:
        """Source of each position [n] and its number of earlier positions in the phase."""
        sources, ranks = np.empty_like(positions), positions.copy()
        nodes = [(np.arange(positions.size), 0, len(self._used))]
        while nodes:
            places, first, end = nodes.pop()
            if not places.size:
                continue
            if end - first == 1:
                sources[places] = self._used[first]
                continue
            fraction, middle = self._left(first, end)
            before, after = _left_count(ranks[places], fraction), _left_count(ranks[places] + 1, fraction)
            left = after > before
            ranks[places] = np.where(left, before, ranks[places] - before)
            nodes += [(places[left], first, middle), (places[~left], middle, end)]
        return sources, ranks

    def counts(self, positions: int) -> Positions:
        """Samples of each source in the phase's first `positions`, [sources]."""
        counts = np.zeros(self._num_sources, np.int64)
        nodes = [(positions, 0, len(self._used))]
        while nodes:
            number, first, end = nodes.pop()
            if end - first == 1:
                counts[self._used[first]] = number
                continue
            fraction, middle = self._left(first, end)
            left = int(_left_count(np.array(number, np.int64), fraction))
            nodes += [(left, first, middle), (number - left, middle, end)]
        return counts

    def _left(self, first: int, end: int) -> tuple[int, int]:
        """The left side's fraction of a node's weight in units of 2^-24, and the first source of the right side."""
        middle = (first + end) // 2
        weight = self._sums[end] - self._sums[first]
        # The weight of a node is 0 where its sources are below the rounding of the sum of the sources before them.
        fraction = (self._sums[middle] - self._sums[first]) / weight if weight else (middle - first) / (end - first)
        # Both sides get some, however small their weight: every source with a weight is sampled.
        return min(max(round(float(fraction) * _UNIT), 1), _UNIT - 1), middle


def _left_count(numbers: Positions, fraction: int) -> Positions:
    """Positions among the first `numbers` that go left: floor(number fraction / 2^24 + 1/2)."""
    return (numbers * fraction + _UNIT // 2) >> _UNIT_BITS
