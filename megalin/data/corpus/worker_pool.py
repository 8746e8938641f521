"""Processes that work for this one: they end with it, and the death of one is an error of the user's."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
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
    """Spawned processes; at the end of the block what they have not begun is cancelled, and the rest awaited.

    Args:
        limit: the flag that, lowered, gives a worker less memory.
        initializer: each process calls it first.

    Raises:
        DataError: a worker died.
    """
    with ProcessPoolExecutor(workers, SPAWN, initializer=_start, initargs=(initializer,)) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker process died (out of memory?): {error}; use fewer --workers or lower {limit}, and go on "
                "with --resume"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start(initializer: Callable[[], object] | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _exit_with_parent() -> None:
    """A run that is killed cannot end its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
