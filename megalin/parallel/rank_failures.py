"""Names the ranks that caused a collective to fail or time out: those that died, stalled or left."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megalin.errors import RankFailedError, RankStalledError, causes
from megalin.parallel.collectives import COLLECTIVE_TIMEOUT
from megalin.parallel.diagnosis import Verdict

_REPORT_SECONDS = 10.0
"""Longest time that a rank whose collective failed waits for the others to report a failure too."""
_TIMEOUT = re.compile(r"(?i)timed out|timeout|launch failure")
"""Part of the message of a collective whose ranks waited too long. A CUDA stream that waits too long for a signal of
another GPU stops with a launch failure."""
_STALLED, _FAILED = "stalled", "failed"
"""Kinds of failures that ranks report to each other."""
_VERDICT_SECONDS = 2.5
"""Longest time that a rank whose collective failed waits for its watchdog."""
_POLL_SECONDS = 1.0
"""Interval at which a rank looks for liveness checks of others."""


class Rendezvous(NamedTuple):
    """The key-value store through which the ranks of a process group meet, and this rank's place in the group."""

    store: dist.Store  # type: ignore[name-defined]
    rank: int
    world_size: int
    timeout: timedelta
    """Longest time that a rank waits for another one in a collective."""


def default_rendezvous() -> Rendezvous:
    """The rendezvous of the default process group."""
    timeout = COLLECTIVE_TIMEOUT
    if "gloo" in dist.get_backend_config():  # not for a plan, where nothing is sent
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
        timeout = getattr(backend, "wrapped_pg", backend).options._timeout
    return Rendezvous(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), timeout)


def no_verdict(seconds: float) -> Verdict | None:
    """The answer without a watchdog."""
    return None


@contextmanager
def report_failed_ranks(
    rendezvous: Rendezvous, *, find_verdict: Callable[[float], Verdict | None] = no_verdict
) -> Iterator[None]:
    """Names the ranks that do not fail with this one where a collective of the body fails: they died, stalled or left.

    Ranks that wait for another give up after the timeout, all within a short time of each other; in a pipeline, or on
    other axes than the failed one, some still wait. Those that respond (`liveness_responder`) are not named, unless all
    do: a process whose main thread stalled responds too.

    Args:
        find_verdict: waits so many seconds for the watchdog's verdict on the ranks of this host.

    Raises:
        RankStalledError: in place of the collective's error, if the collective timed out on any rank.
        RankFailedError: in place of its error if it failed otherwise, as where a rank died or left.
    """
    try:
        yield
    except RuntimeError as error:
        failed = next((cause for cause in causes(error) if _is_collective_error(cause)), None)
        if failed is None:
            raise
        if (verdict := find_verdict(_VERDICT_SECONDS)) is not None:
            raise verdict.error() from error
        silent, stalled = _describe_silent_ranks(rendezvous, stalled=_TIMEOUT.search(str(failed)) is not None)
        kind = RankStalledError if stalled else RankFailedError
        raise kind(f"rank {rendezvous.rank}: a collective failed, {silent}: {failed}") from error


def is_rank_failure(error: BaseException) -> bool:
    """Whether the error is that of a failed rank, or of a collective that failed because of one."""
    return any(isinstance(cause, RankFailedError) or _is_collective_error(cause) for cause in causes(error))


def _is_collective_error(error: BaseException) -> bool:
    communication = "gloo" in str(error) or "launch failure" in str(error)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and communication)


def _describe_silent_ranks(rendezvous: Rendezvous, *, stalled: bool) -> tuple[str, bool]:
    """The ranks without a response, and whether a collective timed out on this rank (`stalled`) or another one: a rank
    that gave up closes its connections, which its neighbours report as a failure."""
    store, silent = rendezvous.store, [other for other in range(rendezvous.world_size) if other != rendezvous.rank]
    deadline = time.monotonic() + min(_REPORT_SECONDS, rendezvous.timeout.total_seconds())
    try:
        store.set(f"failed/{rendezvous.rank}", _STALLED if stalled else _FAILED)
        store.set("liveness_check", "")
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            for other in [other for other in silent if store.check([f"failed/{other}"])]:
                silent.remove(other)
                stalled = stalled or store.get(f"failed/{other}") == _STALLED.encode()
        silent = [other for other in silent if not store.check([f"alive/{other}"])] or silent
    except dist.DistError:
        return "rank 0, which hosts the store of the ranks, has exited", stalled
    names = f"no response from rank {', '.join(map(str, silent))}" if silent else "every rank reports a failure"
    return names, stalled


@contextmanager
def liveness_responder(rendezvous: Rendezvous) -> Iterator[None]:
    """Runs a thread during the body that reports this process alive to ranks whose collective failed: it may itself
    wait for one of them."""
    ended = threading.Event()
    thread = threading.Thread(target=_respond, args=(rendezvous.store.clone(), rendezvous.rank, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_POLL_SECONDS)


def _respond(store: dist.Store, rank: int, ended: threading.Event) -> None:  # type: ignore[name-defined]
    try:
        while not ended.wait(_POLL_SECONDS):
            if store.check(["liveness_check"]):
                store.set(f"alive/{rank}", "")
                return
    except RuntimeError:
        return  # the process that hosts the store has exited: the next collective fails, and reports it
