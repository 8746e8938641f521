"""The order of samples of several sources: which of them gives each position of a run, in closed form."""

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
    """A source as an order sees it."""

    name: str
    num_samples: int


class Phase(NamedTuple):
    """The shares of the sources from a position of the run on."""

    first_position: int
    weights: list[float]
    """One for each source, not negative; 0: it gives no sample."""


class BlendedOrder:
    """Position p of a run as a sample of one of its sources, whose samples are numbered one source after the other.

    A phase shares out its positions down a balanced binary tree over its sources in their order: of the first k that
    reach a node, floor(k s + 1/2) go left, s the left side's part of the node's weight, as a multiple of 2^-24. Which
    source a position reaches, and how many reached it before, is arithmetic: nothing is stored, and no source is off
    its share by more than half a sample for each level of the tree. The k-th position that reaches a source in the run,
    over all phases, reads its sample `endless(k)`: so no phase repeats what another has read of an epoch.
    """

    def __init__(self, sources: Sequence[BlendSource], phases: Sequence[Phase], *, seed: int) -> None:
        """`phases` begin at rising positions, the first at 0."""
        assert phases[0].first_position == 0, phases
        self._sources, self._seed = list(sources), seed
        self._firsts = np.array([phase.first_position for phase in phases], np.int64)
        assert (np.diff(self._firsts) > 0).all(), phases
        self._shares = [_Shares(phase.weights) for phase in phases]
        sizes = [source.num_samples for source in sources]
        self._first_samples = np.cumsum([0, *sizes[:-1]], dtype=np.int64)

    def sources(self, positions: Positions) -> tuple[Positions, Positions]:
        """The source of each position (>= 0, any shape, int64) and how many positions of the run it had before."""
        assert positions.size == 0 or 0 <= positions.min() <= positions.max() < _MOST_POSITIONS, positions
        sources, ranks = np.empty_like(positions), np.empty_like(positions)
        phases = np.searchsorted(self._firsts, positions, side="right") - 1
        for phase in np.unique(phases):
            chosen = phases == phase
            inside, within = self._shares[phase].sources(positions[chosen] - self._firsts[phase])
            sources[chosen] = inside
            ranks[chosen] = within + self.counts(int(self._firsts[phase]))[inside]
        return sources, ranks

    def counts(self, positions: int) -> Positions:
        """How many of the first `positions` of the run each source gives, [sources]."""
        total = np.zeros(len(self._sources), np.int64)
        ends = [*self._firsts[1:].tolist(), positions]
        for first, end, shares in zip(self._firsts.tolist(), ends, self._shares, strict=True):
            total += shares.counts(max(0, min(end, positions) - first))
        return total

    def samples(self, positions: Positions) -> Positions:
        """The samples at `positions` (>= 0, any shape, int64) of the endless run."""
        sources, ranks = self.sources(positions)
        samples = np.empty_like(positions)
        for source in np.unique(sources):
            stream, chosen = self._sources[source], sources == source
            key = "" if stream.name == ONLY_SOURCE else stream.name
            own = endless(ranks[chosen], num_samples=stream.num_samples, seed=self._seed, stream=key)
            samples[chosen] = own + self._first_samples[source]
        return samples


class _Shares:
    """Positions of one phase shared out over the sources that have a weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._num_sources = len(weights)
        self._used = [number for number, weight in enumerate(weights) if weight > 0]
        assert self._used, weights
        sums = np.cumsum([0.0, *(weights[number] for number in self._used)])
        self._sums = sums / sums[-1]

    def sources(self, positions: Positions) -> tuple[Positions, Positions]:
        """The source of each position [n], and how many of the phase it had before."""
        sources, ranks = np.empty_like(positions), positions.copy()
        nodes = [(np.arange(positions.size), 0, len(self._used))]
        while nodes:
            places, first, end = nodes.pop()
            if not places.size:
                continue
            if end - first == 1:
                sources[places] = self._used[first]
                continue
            share, middle = self._left(first, end)
            before, after = _part(ranks[places], share), _part(ranks[places] + 1, share)
            left = after > before
            ranks[places] = np.where(left, before, ranks[places] - before)
            nodes += [(places[left], first, middle), (places[~left], middle, end)]
        return sources, ranks

    def counts(self, positions: int) -> Positions:
        """How many of the phase's first `positions` each source gives, [sources]."""
        counts = np.zeros(self._num_sources, np.int64)
        nodes = [(positions, 0, len(self._used))]
        while nodes:
            number, first, end = nodes.pop()
            if end - first == 1:
                counts[self._used[first]] = number
                continue
            share, middle = self._left(first, end)
            left = int(_part(np.array(number, np.int64), share))
            nodes += [(left, first, middle), (number - left, middle, end)]
        return counts

    def _left(self, first: int, end: int) -> tuple[int, int]:
        """The left side's part of a node's weight in units of 2^-24, and where the right side begins."""
        middle = (first + end) // 2
        part = (self._sums[middle] - self._sums[first]) / (self._sums[end] - self._sums[first])
        # Both sides get some, however small their share: a source that is named is read.
        return min(max(round(float(part) * _UNIT), 1), _UNIT - 1), middle


def _part(numbers: Positions, share: int) -> Positions:
    """How many of the first `numbers` go left: floor(number share / 2^24 + 1/2)."""
    return (numbers * share + _UNIT // 2) >> _UNIT_BITS
