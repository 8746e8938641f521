"""The collective of a library in which a rank waits, read from its stack."""

from __future__ import annotations

import re
import runpy
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.pipelining.schedules import _wait_batch_p2p

from megalin.parallel.blocked_calls import blocked_call
from megalin.parallel.heartbeats import Heartbeat, HeartbeatFile
from megalin.parallel.rank_views import RankViews
from tests.ranks import run_ranks

X = torch.ones(4)


def _send_or_receive() -> None:
    op = dist.irecv if dist.get_rank() == 0 else dist.isend
    _wait_batch_p2p(dist.batch_isend_irecv([dist.P2POp(op, X, 1 - dist.get_rank())]))


def _functional() -> None:
    functional.wait_tensor(functional.all_reduce(X, "sum", dist.group.WORLD))


CALLS: dict[str, Callable[[], object]] = {
    "barrier": dist.barrier,
    "all_gather": lambda: dist.all_gather_object([None, None], 1),
    "_wait_batch_p2p in schedules.py": _send_or_receive,
    "wait_tensor in _functional_collectives.py": _functional,
}
COMPILED = "a collective of a compiled block"
GENERATED = """
import torch
from torch.ops import _c10d_functional

def compiled(x, group):
    return _c10d_functional.wait_tensor(_c10d_functional.all_reduce(x, "sum", group))
"""


def _calls_of_rank_0(generated: Path) -> list[str]:
    """Runs each call on two ranks; rank 1 comes once the stack of rank 0 shows it. Returns what it showed.

    Args:
        generated: a file of code as torch.compile generates it, for the last call.
    """
    store, found = dist.distributed_c10d._get_default_store(), list[str]()
    main_thread = threading.get_ident()

    def look(name: str) -> None:
        deadline, call, before = time.monotonic() + 20, "", ""
        while not (call and call == before) and time.monotonic() < deadline:  # it passes through other frames
            threading.Event().wait(0.05)
            call, before = blocked_call(main_thread), call
        found.append(call)
        store.set(name, "")

    compiled = runpy.run_path(str(generated))["compiled"]
    for name, call in (CALLS | {COMPILED: lambda: compiled(X, dist.group.WORLD.group_name)}).items():
        if dist.get_rank() == 0:
            thread = threading.Thread(target=look, args=(name,))
            thread.start()
            call()
            thread.join()
        else:
            store.get(name)
            call()
    return found


def test_collectives_of_libraries_are_named(tmp_path):
    generated = tmp_path / "megalin/torch/_library/generated.py"  # packages are known by their folders, not by names
    generated.parent.mkdir(parents=True)
    generated.write_text(GENERATED)
    calls = run_ranks(2, _calls_of_rank_0, generated)[0]
    assert [call.partition(", called by ")[0] for call in calls] == [*CALLS, COMPILED]
    assert all(re.search(r"called by \w+ in parallel/ranks\.py:\d+$", call) for call in calls)


def test_a_thread_that_computes_is_in_no_collective():
    assert blocked_call(threading.get_ident()) == ""
    assert blocked_call(-1) == ""


def test_a_rank_is_blocked_until_its_next_change():
    file, heartbeat = HeartbeatFile.create(1), Heartbeat()
    heartbeat.move_to(file, 0)
    views = RankViews(file)
    views.read()
    heartbeat.set_blocked("barrier", file.slots()[0].seconds)
    (view,) = views.read()
    assert (view.slot.state, view.note, view.waits) == ("blocked", "barrier", True)
    assert view.idle_seconds > 0  # its own watchdog made this change
    heartbeat.beat()
    heartbeat.set_blocked("barrier", view.slot.seconds)  # of a change that is over
    (view,) = views.read()
    assert (view.slot.state, view.note, view.idle_seconds) == ("computing", "", 0.0)
    heartbeat.set_blocked("barrier", view.slot.seconds)
    heartbeat.set_blocked("", view.slot.seconds)
    assert file.slots()[0].state == "computing"
