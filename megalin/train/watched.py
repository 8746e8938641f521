"""A run under its watchdog: the heartbeat file of this host's ranks, and its limits and reports."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from megalin.errors import REFUSALS, PreemptedError, StorageError
from megalin.parallel.agreement import on_every_rank, rank, world_size
from megalin.parallel.diagnosis import StallLimits, Verdict
from megalin.parallel.heartbeats import VARIABLE, HeartbeatFile, create, current
from megalin.parallel.host_exchange import HostExchange
from megalin.parallel.rank_failures import default_rendezvous
from megalin.parallel.watchdog import Watchdog, WatchdogReport
from megalin.train.config import RunConfig
from megalin.train.events import EventLog
from megalin.train.run_folder import RunFolder

_MARGIN = timedelta(seconds=60)
"""Time by which a process group waits longer than the watchdog, which names the ranks."""

_log = logging.getLogger(__name__)


def collective_timeout(config: RunConfig) -> timedelta:
    """Longest time that a rank waits in a collective: the watchdog ends the run before."""
    return timedelta(seconds=max(config.train.hang_timeout_seconds, config.train.phase_timeout_seconds)) + _MARGIN


@contextmanager
def watched(config: RunConfig, run: RunFolder, event_log: EventLog) -> Iterator[Watchdog | None]:
    """Watches the ranks of this host during the body, through the launcher's file of heartbeats or one in the run
    folder; a collective. The file stays where the body fails, for a look at the launches of each rank.

    Yields:
        The watchdog; None, with a warning, where the file cannot be mapped.
    """
    hosts = _hosts()
    file = _open_file(run, hosts)
    if file is None:
        yield None
        return
    heartbeat = current()
    heartbeat.move_to(file, rank())
    watchdog = Watchdog(
        file,
        heartbeat,
        rank(),
        StallLimits(config.train.hang_timeout_seconds, config.train.phase_timeout_seconds),
        run.stacks,
        WatchdogReport(warn=lambda text: _log.warning("%s", text), end=lambda verdict: _write_end(event_log, verdict)),
        ends=world_size() > 1 or VARIABLE in os.environ,
        exchange=HostExchange(default_rendezvous().store, hosts, rank()) if len({*hosts}) > 1 else None,
        ranks_per_stage=world_size() // config.parallel.pp,
    )
    own = VARIABLE not in os.environ
    try:
        with watchdog.running():
            yield watchdog
    except BaseException as error:
        heartbeat.end(None if isinstance(error, PreemptedError) else f"{type(error).__name__}: {error}")
        if own and isinstance(error, (*REFUSALS, PreemptedError)):
            _remove(file.path)
        raise
    heartbeat.end()
    if own:
        _remove(file.path)


def _write_end(event_log: EventLog, verdict: Verdict) -> None:
    error = verdict.error()
    event_log.write_last(f"{type(error).__name__}: {error}")


def _hosts() -> list[int]:
    """For each rank, the lowest rank of its host; a collective."""
    if VARIABLE in os.environ:
        return [0] * world_size()
    places = on_every_rank(_place)
    return [places.index(place) for place in places]


def _open_file(run: RunFolder, hosts: Sequence[int]) -> HeartbeatFile | None:
    if (path := os.environ.get(VARIABLE)) is not None:
        return HeartbeatFile.open(path)
    first = hosts[rank()]
    name = run.path / ("heartbeats" if len({*hosts}) == 1 else f"heartbeats-of-rank-{first}-and-others")
    problems = on_every_rank(lambda: _try_to_create(name) if first == rank() else "")
    if not any(problems):
        try:
            return HeartbeatFile.open(name)
        except StorageError as error:
            problems = [str(error)]
    if rank() == 0:
        problem = next(problem for problem in problems if problem)
        _log.warning("no watchdog: %s; a rank that stalls is noticed by the time-out of collectives", problem)
    return None


def _place() -> str:
    """Name of this host and its process namespace: processes of one place see each other."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


def _try_to_create(path: Path) -> str:
    try:
        create(path, world_size())
    except StorageError as error:
        return str(error)
    return ""


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
