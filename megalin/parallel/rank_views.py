"""Views of all ranks of a heartbeat file, by repeated readings: the time without progress, and the process."""

from __future__ import annotations

import time

from megalin.parallel.diagnosis import RankView
from megalin.parallel.heartbeats import HeartbeatFile, RankSlot
from megalin.parallel.process_state import ProcessState, process_state

POLL_SECONDS = 0.5
"""Interval of the readings. A longer gap, while the host or the job was suspended, counts as two intervals."""


class RankViews:
    """Reader of a heartbeat file.

    Attributes:
        seen: the slots of the last reading, by rank.
    """

    def __init__(self, file: HeartbeatFile) -> None:
        self.seen: dict[int, RankSlot] = {}
        self._file = file
        self._idle: dict[int, float] = {}
        self._last = time.monotonic()

    def read(self) -> list[RankView]:
        """Reads all slots."""
        now = time.monotonic()
        gap, self._last = min(now - self._last, 2 * POLL_SECONDS), now
        slots = self._file.slots()
        decided = any(slot.verdict for slot in slots)
        return [self._view(slot, gap, decided) for slot in slots]

    def _view(self, slot: RankSlot, gap: float, decided: bool) -> RankView:
        rank = slot.rank
        # Not the rank itself, but its watchdog changes the state to blocked, after a while without progress.
        before = self.seen.get(rank)
        same = before is not None and before._replace(state=slot.state) == slot
        self._idle[rank] = self._idle.get(rank, 0.0) + gap if same else 0.0
        self.seen[rank] = slot
        process = process_state(slot.pid, slot.started) if slot.started else ProcessState("running")
        # Without a process nothing was launched; the rings of other hosts' ranks lie in no memory yet.
        named = slot.pid and (decided or self._idle[rank] > 2 * POLL_SECONDS or process.state == "dead")
        last = self._file.ring(rank)[-1:] if named else []
        note = self._file.note(rank) if slot.state in ("failed", "blocked") else ""
        waited = time.monotonic() - slot.seconds
        return RankView(slot, self._idle[rank], process, last[0] if last else None, note, waited)
