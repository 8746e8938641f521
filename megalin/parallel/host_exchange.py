"""Views of the ranks of other hosts, through the ranks' store, while the ranks of a host make no progress.

Each host watches its own ranks. A host whose ranks wait asks the others twice a second, and the lowest rank of each
that runs answers with its host's views; it sends them unasked where a rank has died. A host that does not answer has no
rank that runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from megalin.parallel.diagnosis import RankView
from megalin.parallel.heartbeats import RankSlot
from megalin.parallel.messages import decode, encode
from megalin.parallel.process_state import ProcessState
from megalin.parallel.rank_views import POLL_SECONDS

ASK_SECONDS = 1.0
"""Time without progress of a rank after which its host asks the others."""
SILENT_SECONDS = 5.0
"""Time without an answer after which a host counts as silent: it answers twice a second."""
_ASKED = "host_views/asked"


class _Answer(NamedTuple):
    number: int
    views: list[RankView]


class HostExchange:
    """Sends the views of this host's ranks where another host asks, and receives those of others where this one asks.

    A thread of its own calls the store, whose process may be stopped too.

    Args:
        store: of the ranks; this object uses a connection of its own.
        hosts: for each rank, the lowest rank of its host.
        rank: this rank.
    """

    def __init__(self, store: dist.Store, hosts: Sequence[int], rank: int) -> None:  # type: ignore[name-defined]
        self._store, self._hosts, self._rank, self._own = store.clone(), hosts, rank, hosts[rank]
        self._others = sorted({*hosts} - {self._own})
        self._local: list[RankView] = []
        self._asking_since, self._call_since = float("inf"), float("inf")
        self._answered, self._number = 0, 0
        self._received: dict[int, tuple[float, bytes, list[RankView]]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megalin-host-exchange", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Exchanges during the body."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join(2 * POLL_SECONDS)

    def merge(self, views: Sequence[RankView]) -> list[RankView]:
        """The views of this host's ranks among `views`, a new reading, and those of other hosts while this one asks."""
        self._local = [view for view in views if self._hosts[view.slot.rank] == self._own]
        stalls = any(view.idle_seconds >= ASK_SECONDS and view.slot.state not in ("absent", "done") for view in views)
        if not (stalls or any(view.slot.verdict for view in self._local)):
            self._asking_since = float("inf")
        else:
            self.ask()
        return self._local + self._remote()

    def ask(self) -> None:
        """Asks the other hosts, until the ranks of this one go on."""
        self._asking_since = min(self._asking_since, time.monotonic())

    def _remote(self) -> list[RankView]:
        now = time.monotonic()
        if now < self._asking_since:
            return []
        if (waited := now - self._call_since) > SILENT_SECONDS:  # the store does not answer, so that no host can
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
            return [self._silent(0, waited)] if hosted and self._own != self._hosts[0] else []
        found: list[RankView] = []
        for host in self._others:
            time_received, _, views = self._received.get(host, (0.0, b"", []))
            silence = now - max(time_received, self._asking_since)
            if silence > SILENT_SECONDS:
                found += [self._silent(rank, silence) for rank, other in enumerate(self._hosts) if other == host]
            elif time_received >= self._asking_since:
                found += [view._replace(idle_seconds=view.idle_seconds + silence) for view in views]
        return found

    def _silent(self, rank: int, seconds: float) -> RankView:
        own = next(view.slot for view in self._local if view.slot.rank == self._rank)
        slot = RankSlot(rank, 0, own.phase, own.step, 0, 0.0, "computing", 0)
        return RankView(slot, seconds, ProcessState("silent"), age_seconds=seconds)

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(POLL_SECONDS)
            if ended and not self._has_news():
                return
            self._call_since = time.monotonic()
            try:
                self._exchange()
            except RuntimeError:
                return  # the process of the store has exited: collectives fail, and report it
            self._call_since = float("inf")

    def _has_news(self) -> bool:
        """Whether a rank of this host has died, or a watchdog has named one."""
        return any(view.slot.verdict or view.process.state == "dead" for view in self._local)

    def _exchange(self) -> None:
        asks = time.monotonic() >= self._asking_since
        running = [view.slot.rank for view in self._local if view.slot.pid and view.process.state == "running"]
        answers = self._rank == min(running, default=-1)
        asked = self._store.add(_ASKED, int(asks)) if asks or answers else self._answered
        if answers and (asked != self._answered or self._has_news()):
            self._answered, self._number = asked, self._number + 1
            self._store.set(f"host_views/{self._own}", encode(_Answer(self._number, self._local), _Answer))
        for host in self._others if asks else []:
            if self._store.check([f"host_views/{host}"]):
                data = self._store.get(f"host_views/{host}")
                if data != self._received.get(host, (0.0, b"", []))[1]:
                    self._received[host] = time.monotonic(), data, decode(data, _Answer).views
