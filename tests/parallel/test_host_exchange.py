"""Hosts whose ranks wait: they see the ranks of other hosts, and name a host that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from megalin.parallel import host_exchange
from megalin.parallel.diagnosis import RankView, StallLimits, diagnose
from megalin.parallel.heartbeats import RankSlot
from megalin.parallel.host_exchange import HostExchange
from megalin.parallel.process_state import ProcessState

HOSTS = [0, 0, 2, 2]
LIMITS = StallLimits(10.0, 60.0)


def view(rank: int, state: str, idle: float, process: str = "running", **more: int) -> RankView:
    slot = RankSlot(rank, 100 + rank, "step", 3, 5, 1.0, state, 1, **more)  # type: ignore[arg-type]
    return RankView(slot, idle, ProcessState(process))  # type: ignore[arg-type]


def reading(*views: RankView) -> list[RankView]:
    """A reading of a host's file, in which the ranks of other hosts are absent."""
    own = {each.slot.rank: each for each in views}
    absent = RankSlot(0, 0, "none", 0, 0, 0.0, "absent", 0)
    return [own.get(rank, RankView(absent._replace(rank=rank), 99.0, ProcessState("running"))) for rank in range(4)]


WAITING = reading(view(0, "waiting", 11.0), view(1, "waiting", 11.0))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HostExchange, HostExchange]]:
    """The exchanges of rank 0 and of rank 2, the lowest of two hosts, that run."""
    monkeypatch.setattr(host_exchange, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(host_exchange, "SILENT_SECONDS", 0.5)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second = (HostExchange(store, HOSTS, rank) for rank in (0, 2))
    with ExitStack() as stack:
        for exchange in (first, second):
            stack.enter_context(exchange.running())
        yield first, second


def _wait_for(views: Callable[[], list[RankView]], number: int) -> list[RankView]:
    deadline = time.monotonic() + 20
    while len(found := views()) != number:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_stopped_rank_of_another_host_is_named(pair):
    first, second = pair
    second.merge(reading(view(2, "waiting", 11.0), view(3, "computing", 11.0, "stopped")))
    verdict = diagnose(_wait_for(lambda: first.merge(WAITING), 4), LIMITS)
    assert verdict is not None
    assert verdict[:2] == (7, (3,))
    assert "rank 3 stalled: no progress for 11 s in step 3 (phase: step); its process is stopped" in verdict.message


def test_host_that_works_in_another_phase_is_waited_for(pair):
    first, second = pair
    saving = view(2, "computing", 11.0)
    second.merge(reading(saving._replace(slot=saving.slot._replace(phase="save")), view(3, "waiting", 11.0)))
    assert diagnose(_wait_for(lambda: first.merge(WAITING), 4), LIMITS) is None


def test_host_that_does_not_answer_is_named(pair):
    first, _ = pair  # the other one has no rank that runs
    views = _wait_for(lambda: first.merge(WAITING), 4)
    assert [each.process.state for each in views] == ["running", "running", "silent", "silent"]
    late = [each._replace(idle_seconds=max(each.idle_seconds, 11.0)) for each in views]
    verdict = diagnose(late, LIMITS)
    assert verdict is not None
    assert verdict[:2] == (7, (2, 3))
    assert "its host does not answer" in verdict.message


def test_rank_that_died_on_another_host_is_named_before_the_limit(pair):
    first, second = pair
    second.merge(reading(view(2, "waiting", 0.0), view(3, "computing", 0.0, "dead")))
    verdict = diagnose(_wait_for(lambda: first.merge(WAITING), 4), LIMITS._replace(hang=60.0))
    assert verdict is not None
    assert verdict[:2] == (6, (3,))


def test_ranks_that_go_on_ask_for_nothing(pair):
    first, second = pair
    second.merge(reading(view(2, "waiting", 0.0), view(3, "waiting", 0.0)))
    _wait_for(lambda: first.merge(WAITING), 4)
    fresh = reading(view(0, "waiting", 0.0), view(1, "computing", 0.0))
    assert [each.slot.rank for each in first.merge(fresh)] == [0, 1]


class _DeadStore:
    """A store whose process is stopped: a call does not return before `exits`."""

    def __init__(self) -> None:
        self.called, self.exits = threading.Event(), threading.Event()

    def clone(self) -> _DeadStore:
        return self

    def add(self, *_: object) -> int:
        self.called.set()
        self.exits.wait(20)
        raise RuntimeError("the store has exited")


@pytest.mark.parametrize(("agent", "silent"), [("False", [0]), ("True", [])])
def test_rank_0_is_named_where_it_hosts_a_store_that_does_not_answer(monkeypatch, agent, silent):
    monkeypatch.setattr(host_exchange, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(host_exchange, "SILENT_SECONDS", -1.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    store = _DeadStore()
    exchange = HostExchange(store, HOSTS, 2)
    exchange.ask()
    with exchange.running():
        store.called.wait(20)
        views = exchange.merge(reading(view(2, "waiting", 11.0), view(3, "waiting", 11.0)))
        store.exits.set()
    assert [each.slot.rank for each in views if each.process.state == "silent"] == silent
