"""A run under its watchdog: the heartbeats of this host's ranks, and its limits and reports."""

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
from megalin.parallel.heartbeat_copies import write_copy, write_pointer
from megalin.parallel.heartbeats import VARIABLE, HeartbeatFile, current
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
    """Watches the ranks of this host during the body, through heartbeats in memory, the launcher's or its own; a
    collective. Where the body fails, a copy stays in the run folder, for a look at the launches of each rank.

    Yields:
        The watchdog; None, with a warning, where there is no memory for heartbeats.
    """
    hosts = _hosts()
    file = _open_heartbeats(hosts)
    if file is None:
        yield None
        return
    heartbeat = current()
    heartbeat.move_to(file, rank())
    path = None if VARIABLE in os.environ else _path(run, hosts)
    if path is not None and rank() == hosts[rank()]:
        write_pointer(file, path)
    watchdog = Watchdog(
        file,
        heartbeat,
        rank(),
        StallLimits(config.train.hang_timeout_seconds, config.train.phase_timeout_seconds),
        run.stacks,
        WatchdogReport(
            warn=lambda text: _log.warning("%s", text), end=lambda verdict: _write_end(event_log, verdict, file, path)
        ),
        ends=world_size() > 1 or VARIABLE in os.environ,
        exchange=HostExchange(default_rendezvous().store, hosts, rank()) if len({*hosts}) > 1 else None,
        ranks_per_stage=world_size() // config.parallel.pp,
    )
    keeps = False
    try:
        with watchdog.running():
            yield watchdog
        heartbeat.end()
    except BaseException as error:
        heartbeat.end(None if isinstance(error, PreemptedError) else f"{type(error).__name__}: {error}")
        keeps = not isinstance(error, (*REFUSALS, PreemptedError))
        raise
    finally:
        if path is not None and keeps:
            write_copy(file, path)
        elif path is not None:
            _remove(path)
        file.close()


def _write_end(event_log: EventLog, verdict: Verdict, file: HeartbeatFile, path: Path | None) -> None:
    error = verdict.error()
    event_log.write_last(f"{type(error).__name__}: {error}")
    if path is not None:
        write_copy(file, path)


def _hosts() -> list[int]:
    """For each rank, the lowest rank of its host; a collective."""
    if VARIABLE in os.environ:
        return [0] * world_size()
    places = on_every_rank(_place)
    return [places.index(place) for place in places]


def _path(run: RunFolder, hosts: Sequence[int]) -> Path:
    """File of this host's heartbeats in the run folder."""
    one = len({*hosts}) == 1
    return run.path / ("heartbeats" if one else f"heartbeats-of-rank-{hosts[rank()]}-and-others")


def _open_heartbeats(hosts: Sequence[int]) -> HeartbeatFile | None:
    """The heartbeats of this host's ranks, which its lowest rank creates; a collective."""
    if (path := os.environ.get(VARIABLE)) is not None:
        return HeartbeatFile.open(path)
    first = hosts[rank()]
    file, problem = _try_to_create(hosts) if first == rank() else (None, "")
    created = on_every_rank(lambda: ("" if file is None else str(file.path), problem))
    problems = [problem for _, problem in created]
    if not any(problems):
        try:
            return file or HeartbeatFile.open(created[first][0])
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


def _try_to_create(hosts: Sequence[int]) -> tuple[HeartbeatFile | None, str]:
    try:
        own = [number for number, host in enumerate(hosts) if host == rank()]
        return HeartbeatFile.create(world_size(), own), ""
    except StorageError as error:
        return None, str(error)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
