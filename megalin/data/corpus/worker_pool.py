"""A spawn process pool whose workers exit with the parent; a dead worker raises DataError."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from megalin.errors import DataError

SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def worker_pool(
    workers: int, *, limit: str, initializer: Callable[[], object] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Spawns worker processes; the end of the block cancels pending tasks and waits for the running ones.

    Args:
        limit: flag to lower, for the error message, so that a worker needs less memory.
        initializer: called first in each process.

    Raises:
        DataError: a worker died.
    """
    with ProcessPoolExecutor(workers, SPAWN, initializer=_start, initargs=(initializer,)) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker process died (out of memory?): {error}; use fewer --workers or lower {limit}, and "
                "continue with --resume"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start(initializer: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))  # a terminal interrupts the parent too, which reports it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _exit_with_parent() -> None:
    """Exits with the parent: a killed run cannot stop its workers, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
