"""Warning where steps wait for their samples: the fraction of their time, and the rank that waits longest."""

from __future__ import annotations

from collections import Counter, deque

WINDOW = 20
"""Steps that a warning is about."""
MOST_FRACTION = 0.05
"""Fraction of the time of these steps above which a run is warned."""
LEAST_SECONDS = 1e-3
"""Mean wait of a step below which a run is not warned: steps of a few milliseconds."""
PAUSE = 1000
"""Steps between two warnings."""


class DataWaitMonitor:
    """Reports long waits for data. The first step of a process is left out: nothing was read ahead for it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=WINDOW)  # wait, rank that waited longest, duration
        self._num_steps = 0
        self._next_report = 0

    def add(self, *, wait_seconds: float, rank: int, step_seconds: float) -> str:
        """Adds a step; returns a message for people if its last 20 steps waited too long, at most every 1,000 steps."""
        self._num_steps += 1
        if self._num_steps == 1:
            return ""
        self._steps.append((wait_seconds, rank, step_seconds))
        waited = sum(wait for wait, _, _ in self._steps)
        fraction = waited / max(sum(seconds for _, _, seconds in self._steps), 1e-9)
        full = len(self._steps) == WINDOW
        if not full or self._num_steps < self._next_report or waited < WINDOW * LEAST_SECONDS:
            return ""
        if fraction <= MOST_FRACTION:
            return ""
        self._next_report = self._num_steps + PAUSE
        slowest = Counter(rank for _, rank, _ in self._steps)
        return (
            f"the last {WINDOW} steps waited for data for {fraction:.0%} of their time, longest on rank "
            f"{slowest.most_common(1)[0][0]}; raise data.workers or data.read_ahead_steps, or use faster storage"
        )
