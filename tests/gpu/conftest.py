"""What every test on the chip starts from: a device, and uninitialised memory that shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder bear the mark gpu, and are left out where there is none."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory of `torch.empty` holds NaN; cuBLAS only warns."""
    # The mode changes what Inductor compiles; that file measures what users train with.
    deterministic = request.path.name != "test_training_gpu.py"
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
