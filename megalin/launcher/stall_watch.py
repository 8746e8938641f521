"""The launcher's own watch over its ranks, for a stall in which no rank's watchdog can run: all are stopped, say."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megalin.errors import RankStalledError
from megalin.parallel.diagnosis import RankView, StallLimits, Verdict, diagnose
from megalin.parallel.heartbeats import HeartbeatFile, start_ticks
from megalin.parallel.process_state import process_state
from megalin.parallel.rank_views import POLL_SECONDS, RankViews

_LATER_SECONDS = 5.0
"""Time for which the launcher waits longer than the ranks' watchdogs, which know the steps and write stacks."""


class StallWatch:
    """Watches the heartbeats of the ranks, at most twice a second; `pids` are their processes, by rank."""

    def __init__(self, file: HeartbeatFile, limits: StallLimits, pids: Sequence[int]) -> None:
        self._views = RankViews(file)
        self._processes = [(pid, start_ticks(pid)) for pid in pids]
        self._limits = StallLimits(*(limit + _LATER_SECONDS for limit in limits))
        self._next = 0.0
        self._steps: dict[int, tuple[int, float]] = {}
        self._longest_step = 0.0

    def check(self) -> Verdict | None:
        """The verdict on ranks that have stalled; None while there are none."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + POLL_SECONDS
        views = [self._with_process(view) for view in self._views.read()]
        for rank, slot in self._views.seen.items():
            step, since = self._steps.get(rank, (0, now))
            if slot.step != step:
                self._longest_step = max(self._longest_step, now - since if step else 0.0)
                self._steps[rank] = slot.step, now
        verdict = diagnose(views, self._limits._replace(hang=max(self._limits.hang, 2 * self._longest_step)))
        return verdict if verdict is not None and verdict.exit_code == RankStalledError.exit_code else None

    def _with_process(self, view: RankView) -> RankView:
        """A rank that has not opened the file yet is at its start."""
        if view.slot.state != "absent":
            return view
        pid, started = self._processes[view.slot.rank]
        slot = view.slot._replace(pid=pid, started=started, phase="start", state="computing")
        return view._replace(slot=slot, process=process_state(pid, started))
