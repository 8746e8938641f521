"""Common start of every test: one seed, one thread, nothing compiled, and uninitialised memory filled with NaN."""

import gc
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch

from tests.rare_collections import freeze_again

if not torch.cuda.is_available():
    import tests.interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds the generators; outside GPU tests every `torch.empty` holds NaN, so that an unwritten element is seen.

    Resets torch.compile: compilations of earlier tests count against the limit per function.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    freeze_again()
    torch.manual_seed(0)
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
    """Excludes the modules and the tests from garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Ends the server that ranks were forked from, once they have exited: their CPU time then counts as this process's,
    which is what tools/cpu_seconds.py and a shell's `time` print."""
    for child in multiprocessing.active_children():
        child.join(timeout=10)
    forkserver._forkserver._stop()
