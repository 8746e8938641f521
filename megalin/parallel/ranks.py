"""Ranks forked from a process that has loaded their modules: their results, and the ranks that failed."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalin.errors import RankFailedError
from megalin.parallel.process_group import init_default_group
from megalin.parallel.rank_failures import Rendezvous, default_rendezvous, liveness_responder, report_failed_ranks

_PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed._composable",
    "torch._dynamo",
    "torch._inductor.utils",
]
"""Modules that every rank needs, loaded before the fork."""
_COLLECTIVE_SECONDS = 600.0
"""The longest that a rank waits for another in one collective."""

_context = multiprocessing.get_context("forkserver")


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float | None = 120.0,
    collective_timeout: float | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Calls the module-level `function(*args)` on `world_size` gloo ranks; returns its results by rank.

    Args:
        timeout: seconds for the whole call; None: no limit besides that of a collective.
        collective_timeout: seconds for a collective; left out: two fifths of `timeout`, ten minutes at most.
        preload: modules to load before torch's into the process that the ranks of all calls are forked from; the first
            call starts it.

    Raises:
        RankFailedError: a rank raised (its traceback), died without a report (its exit code, the Python stacks of its
            threads if a signal such as SIGSEGV ended it), or did not report in time.
    """
    _context.set_forkserver_preload([*preload, *_PRELOAD])
    reports, done = _context.Queue(), _context.Event()
    if collective_timeout is None:
        collective_timeout = _COLLECTIVE_SECONDS if timeout is None else min(0.4 * timeout, _COLLECTIVE_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        place = (folder, world_size, collective_timeout)
        workers = [
            _context.Process(target=_worker, args=(rank, place, function, args, reports, done), daemon=True)
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            results = _collect(workers, reports, None if timeout is None else time.monotonic() + timeout)
            done.set()
        except RankFailedError as error:
            raise RankFailedError("\n".join([str(error), *_stacks(Path(folder))])) from None
        finally:
            for worker in workers:
                worker.join(timeout=10 if done.is_set() else 0)
                if worker.is_alive():
                    worker.kill()
                    worker.join()  # its locks are free
    return [results[rank] for rank in range(world_size)]


def _worker(rank: int, place: tuple[str, int, float], function: Any, args: Any, reports: Any, done: Any) -> None:
    """Runs one rank, which exits once all have reported: others may still read data that it sent."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.freeze()  # objects from before the fork stay: no collection visits them, nor copies their pages
    # Torch warns of every tensor that takes two all-gathers to become full.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder, world_size, seconds = place
    faulthandler.enable((Path(folder) / f"rank {rank}").open("w"))
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world_size)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=seconds)
        store.set(f"started/{rank}", "")  # a fork may be slow where a collective may not
        store.wait([f"started/{other}" for other in range(world_size)], timedelta(seconds=_COLLECTIVE_SECONDS))
        init_default_group(Rendezvous(store, rank, world_size, timeout), "gloo")
        with report_failed_ranks(default_rendezvous()), liveness_responder(default_rendezvous()):
            result = function(*args)
        reports.put((rank, None, result))
    except BaseException:
        reports.put((rank, traceback.format_exc(), None))
        raise
    done.wait()
    if dist.is_initialized():  # unless the function replaced the group
        dist.destroy_process_group()


def _collect(workers: list[Any], reports: Any, deadline: float | None) -> dict[int, Any]:
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        # Read first: the report of a rank that died later is then in the queue.
        codes = {rank: worker.exitcode for rank, worker in enumerate(workers) if worker.exitcode not in (None, 0)}
        try:
            rank, error, result = reports.get(timeout=0.2)
        except queue.Empty:
            if codes:
                raise RankFailedError(f"{_deaths(codes)}; reported: {sorted(results)}") from None
            if deadline is not None and time.monotonic() > deadline:
                silent = [str(rank) for rank in range(len(workers)) if rank not in results]
                raise RankFailedError(f"timed out: no result from rank {', '.join(silent)}") from None
            continue
        if error is not None:
            # The cause may be another rank that was killed. A rank that raises exits with 1.
            killed = _deaths({rank: code for rank, code in codes.items() if code != 1})
            raise RankFailedError(f"{killed}; then rank {rank}:\n{error}" if killed else f"rank {rank}:\n{error}")
        results[rank] = result
    return results


def _deaths(codes: dict[int, int]) -> str:
    return ", ".join(f"rank {rank} died: {code}" for rank, code in codes.items())


def _stacks(folder: Path) -> list[str]:
    """The Python stacks of the threads of each rank that a signal such as SIGSEGV ended."""
    stacks = {path.name: path.read_text() for path in sorted(folder.glob("rank *"))}
    return [f"{rank}: {text}" for rank, text in stacks.items() if text]
