"""Runs a function on several gloo ranks inside the ordinary suite, cheaply: forkserver with torch preloaded."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

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

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


class RankFailedError(AssertionError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


def _worker(rank: int, world_size: int, store: str, function: Any, args: tuple[Any, ...], reports: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        reports.put((rank, None, function(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever a rank raised is what the test must show
        reports.put((rank, traceback.format_exc(), None))


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls the module-level `function(*args)` on `world_size` gloo ranks; returns its results by rank.

    Raises:
        RankFailedError: when a rank raises (its traceback), dies without a report, or the deadline passes.
    """
    reports = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        workers = [
            _context.Process(target=_worker, args=(rank, world_size, store, function, args, reports), daemon=True)
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            results = _collect(workers, reports, time.monotonic() + timeout)
        finally:
            for worker in workers:
                worker.join(timeout=10)
                if worker.is_alive():
                    worker.kill()
    return [results[rank] for rank in range(world_size)]


def _collect(workers: list[Any], reports: Any, deadline: float) -> dict[int, Any]:
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        try:
            rank, error, result = reports.get(timeout=0.2)
        except queue.Empty:
            dead = [rank for rank, w in enumerate(workers) if w.exitcode not in (None, 0) and rank not in results]
            if dead or time.monotonic() > deadline:
                _kill(workers)
                reason = f"rank {dead[0]} died: {workers[dead[0]].exitcode}" if dead else "timed out"
                raise RankFailedError(f"{reason}; reported: {sorted(results)}") from None
            continue
        if error is not None:
            _kill(workers)
            raise RankFailedError(f"rank {rank}:\n{error}")
        results[rank] = result
    return results


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        worker.kill()
