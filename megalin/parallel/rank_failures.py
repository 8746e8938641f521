"""Which ranks had no part in an exchange that failed: those that died, stalled or left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megalin.errors import RankFailedError, causes
from megalin.parallel.collectives import EXCHANGE_TIMEOUT

_WORD_SECONDS = 10.0
"""How long a rank whose exchange failed waits for the others to fail as well."""
_ANSWER_SECONDS = 1.0
"""How often a rank looks whether another one asks who is there."""


class Rendezvous(NamedTuple):
    """Where the ranks of a process group meet, as one of them sees it."""

    store: dist.Store  # type: ignore[name-defined]
    rank: int
    world_size: int
    timeout: timedelta
    """How long a rank waits for another one in an exchange."""


def default_rendezvous() -> Rendezvous:
    """That of the default process group."""
    timeout = EXCHANGE_TIMEOUT
    if "gloo" in dist.get_backend_config():  # not for a plan, where nothing is sent
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL a wrapper stands before it.
        timeout = getattr(backend, "wrapped_pg", backend).options._timeout
    return Rendezvous(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), timeout)


@contextmanager
def report_failed_ranks(place: Rendezvous) -> Iterator[None]:
    """Where an exchange of the body fails, tells which ranks do not fail with it: those that died, stalled or left.

    Ranks that wait for another give up after the timeout, all within a short time of each other; in a pipeline, or on
    other axes than the one that failed, some wait on. Those that say so (`answering`) are not named, unless all do: a
    process also answers whose main thread stalled.

    Raises:
        RankFailedError: in place of the error of the exchange.
    """
    try:
        yield
    except RuntimeError as error:
        failed = next((cause for cause in causes(error) if _is_of_an_exchange(cause)), None)
        if failed is None:
            raise
        raise RankFailedError(f"rank {place.rank}: an exchange failed, {_blamed(place)}: {failed}") from error


def _is_of_an_exchange(error: BaseException) -> bool:
    # A stream that waited too long for a signal of another GPU stops with a launch failure.
    told = "gloo" in str(error) or "launch failure" in str(error)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and told)


def _blamed(place: Rendezvous) -> str:
    store, silent = place.store, [other for other in range(place.world_size) if other != place.rank]
    deadline = time.monotonic() + min(_WORD_SECONDS, place.timeout.total_seconds())
    try:
        store.set(f"failed/{place.rank}", "")
        store.set("asked", "")
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = [other for other in silent if not store.check([f"failed/{other}"])]
        silent = [other for other in silent if not store.check([f"alive/{other}"])] or silent
    except dist.DistError:
        return "rank 0, which keeps what the others say, has ended"
    return f"no word from rank {', '.join(map(str, silent))}" if silent else "every rank failed in it"


@contextmanager
def answering(place: Rendezvous) -> Iterator[None]:
    """During the body, a thread tells ranks whose exchange failed that this process lives, which may itself wait for
    one of them."""
    ended = threading.Event()
    answers = threading.Thread(target=_answer, args=(place.store.clone(), place.rank, ended), daemon=True)
    answers.start()
    try:
        yield
    finally:
        ended.set()
        answers.join(_ANSWER_SECONDS)


def _answer(store: dist.Store, rank: int, ended: threading.Event) -> None:  # type: ignore[name-defined]
    try:
        while not ended.wait(_ANSWER_SECONDS):
            if store.check(["asked"]):
                store.set(f"alive/{rank}", "")
                return
    except RuntimeError:
        return  # whoever kept the store has ended: the next exchange fails by it, and says so
