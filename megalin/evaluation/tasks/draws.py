"""Random draws of one example, keyed by the task, the seed and the example's number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

ItemT = TypeVar("ItemT")
Integers = npt.NDArray[np.int64]

_BLOCK = 1024


class ExampleDraws:
    """Source of random numbers that is a pure function of (task, seed, number).

    Philox is keyed by sha256 of these words, so that any process can make any example alone, and neighbouring seeds
    have unrelated examples. Every method is made of uniform float64 numbers, the output of NumPy that does not change
    between its versions; those of its other distributions may.
    """

    def __init__(self, task: str, seed: int, number: int) -> None:
        """Starts the draws of example `number` (>= 0) of `task`."""
        assert number >= 0, number
        digest = hashlib.sha256(f"megalin task {task} {seed} {number}".encode()).digest()
        self._generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        self._block: list[float] = []

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """[count] numbers in [0, 1)."""
        return self._generator.random(count)

    def integers(self, bound: int, count: int) -> Integers:
        """[count] integers in [0, bound), each equally likely to one part in 2^53 / bound."""
        assert 1 <= bound <= 2**31, bound
        return (self._generator.random(count) * bound).astype(np.int64)

    def fraction(self) -> float:
        """One number in [0, 1). Single draws come from a block of their own: arrays cost more to call for."""
        if not self._block:
            self._block = self._generator.random(_BLOCK).tolist()
        return self._block.pop()

    def integer(self, first: int, last: int) -> int:
        """One integer in [first, last]."""
        assert first <= last, (first, last)
        return first + int(self.fraction() * (last - first + 1))

    def choice(self, items: Sequence[ItemT]) -> ItemT:
        """One of the items."""
        return items[self.integer(0, len(items) - 1)]

    def order(self, count: int) -> Integers:
        """A permutation of 0 .. count - 1."""
        return np.argsort(self._generator.random(count), kind="stable")

    def distinct(self, bound: int, count: int) -> Integers:
        """[count] different integers in [0, bound), in random order."""
        assert 0 <= count <= bound, (count, bound)
        if 2 * count > bound:
            return self.order(bound)[:count]
        found: dict[int, None] = {}
        while len(found) < count:
            found.update(dict.fromkeys(self.integers(bound, 2 * count).tolist()))
        return np.array(list(found)[:count], np.int64)

    def weighted_distinct(self, weights: npt.NDArray[np.float64], count: int) -> Integers:
        """[count] different integers in [0, n), drawn one after the other with probabilities in proportion to
        `weights` [n], all positive, among those that are left.

        The order of E_i / w_i with E_i exponential is such a sequence of draws (Efraimidis and Spirakis 2006).
        """
        assert 0 <= count <= weights.size, (count, weights.size)
        times = -np.log1p(-self._generator.random(weights.size)) / weights
        return np.argsort(times, kind="stable")[:count]
