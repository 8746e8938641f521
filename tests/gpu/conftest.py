"""Common start of every GPU test: a CUDA device, uninitialised memory filled with NaN, and listed launches alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.listed_launches import listed_launches
from tools.kernel_launches.recorder import compiled_launches


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder with `gpu` and skips them without a CUDA device."""
    here = Path(__file__).parent
    files = {path for path in {item.path for item in items} if here in path.parents}  # of thousands of items
    for item in items:
        if item.path in files:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fills the memory of `torch.empty` with NaN; cuBLAS only warns."""
    # The mode changes the code that Inductor compiles; that file tests the code that users train with.
    deterministic = request.path.name != "test_training_gpu.py"
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _listed() -> Iterator[None]:
    """Fails the first test of a process that launches a kernel in a form that is not compiled ahead of time."""
    with listed_launches(compiled_launches):
        yield
