"""Common start of every test: one seed, one thread, nothing compiled, and uninitialised memory filled with NaN."""

import gc
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch

from tests.rare_collections import freeze_again

ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    import tests.interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds the generators; outside GPU tests every `torch.empty` holds NaN, so that an unwritten element is seen.

    Resets torch.compile: compilations of earlier tests count against the limit per function.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    freeze_again()
    # torch.manual_seed keeps the formatted stack of each call for three kinds of devices that may still be initialised.
    seed = torch.default_generator.manual_seed if ON_CPU else torch.manual_seed
    seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Deterministic mode fills uninitialised memory; cuBLAS refuses it without an environment variable.
    poison = request.node.get_closest_marker("gpu") is None
    torch.use_deterministic_algorithms(poison)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def with_slow(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests of the file run too; if not, fixtures of the file leave out their cases."""
    return any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files with slow tests first, then those that start ranks, so that workers finish at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], not hasattr(item.module, "run_ranks")))


def pytest_collection_finish() -> None:
    """Excludes the modules and the tests from garbage collections, and torch's loggers below `torch` from pytest, which
    adds handlers to every logger that does not propagate in each phase of a test: to sixty of torch, and to the one for
    traces of compilations, which then formats every graph."""
    gc.collect()
    gc.freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and not logger.propagate:
            logger.handlers.clear()
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Ends the server that ranks were forked from, once they have exited: their CPU time then counts as this process's,
    which is what tools/cpu_seconds.py and a shell's `time` print."""
    for child in multiprocessing.active_children():
        child.join(timeout=10)
    forkserver._forkserver._stop()
