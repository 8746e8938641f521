"""Warning where saves take much of a run's time."""

from __future__ import annotations

from collections import deque

WINDOW = 2
"""Saves that a warning is about."""
MOST_FRACTION = 0.1
"""Fraction of the time since the save before them above which a run is warned."""
LEAST_SECONDS = 1.0
"""Mean duration below which a run is not warned."""
PAUSE = 20
"""Saves between two warnings."""


class SaveMonitor:
    """Reports saves that hold up training; the steps wait for them.

    Args:
        in_background: the steps wait for copies, and for a save before that is still being written.
    """

    def __init__(self, *, in_background: bool = False) -> None:
        self._remedy = "or use faster storage" if in_background else "use faster storage, or set checkpoint.background"
        self._saves: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # duration, time since the end of the one before
        self._last_end: float | None = None
        self._num_saves = 0
        self._next_report = 0

    def add(self, *, started: float, ended: float) -> str:
        """Adds a save by its times of one clock, in seconds; returns a message for people if the last 2 saves took more
        than a tenth of the time, at most every 20 saves."""
        self._num_saves += 1
        if self._last_end is not None:
            self._saves.append((ended - started, ended - self._last_end))
        self._last_end = ended
        saved = sum(seconds for seconds, _ in self._saves)
        fraction = saved / max(sum(interval for _, interval in self._saves), 1e-9)
        if len(self._saves) < WINDOW or self._num_saves < self._next_report or saved < WINDOW * LEAST_SECONDS:
            return ""
        if fraction <= MOST_FRACTION:
            return ""
        self._next_report = self._num_saves + PAUSE
        return (
            f"the last {WINDOW} saves took {saved / WINDOW:.1f} s each, {fraction:.0%} of the time; raise "
            f"checkpoint.every_steps, {self._remedy}"
        )
