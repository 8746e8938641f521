"""Batches of the sample order that a run leaves out: the windows between a checkpoint and a loss spike."""

from __future__ import annotations

from typing import Any, NamedTuple

_MOST_BATCHES = 10**12


class SkippedBatches(NamedTuple):
    """Windows of batches that a run leaves out.

    Batch b >= 1 is positions [(b - 1) G, b G) of the sample order, G = train.global_batch_size. Without windows step s
    reads batch s; with them it reads the s-th batch outside of all windows. So the samples of each step are a function
    of the windows alone, on every mesh.
    """

    windows: tuple[tuple[int, int], ...] = ()
    """First and last batch of each window, ascending, with at least one batch between two windows."""

    def batch(self, step: int) -> int:
        """The batch that `step` (>= 1) reads; 0 for step 0."""
        batch = step
        for first, last in self.windows:
            if first > batch:
                break
            batch += last - first + 1
        return batch

    def before(self, step: int) -> SkippedBatches:
        """The windows that the first `step` steps have passed: those before the batch of the last of them."""
        return SkippedBatches(tuple(window for window in self.windows if window[0] < self.batch(step)))

    def union(self, *others: tuple[int, int]) -> SkippedBatches:
        """These windows and others, which may overlap."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted((*self.windows, *others)):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        return SkippedBatches(tuple(merged))

    def to_json(self) -> list[list[int]]:
        """The windows as lists."""
        return [list(window) for window in self.windows]

    @classmethod
    def from_json(cls, value: Any) -> SkippedBatches:
        """Inverse of `to_json`. Raises ValueError for another form."""
        windows: list[tuple[int, int]] = []
        end = 0
        for window in value if isinstance(value, list) else [value]:
            match window:
                case [int(first), int(last)] if end < first <= last <= _MOST_BATCHES:
                    windows.append((first, last))
                    end = last + 1
                case _:
                    raise ValueError(f"{value!r}: expected windows [first, last] that rise, with a batch between two")
        return cls(tuple(windows))

    def __str__(self) -> str:
        """Such as "101 to 150, 220 to 230"."""
        return ", ".join(f"{first:,} to {last:,}" for first, last in self.windows)
