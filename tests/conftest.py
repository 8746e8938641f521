"""What every test starts from: one seed, one thread, and uninitialised memory that shows."""

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    import tests.interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds the generators; outside GPU tests every `torch.empty` holds NaN, so an element that nobody writes shows."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Deterministic mode is what fills memory; cuBLAS refuses it without an environment variable.
    poison = request.node.get_closest_marker("gpu") is None
    torch.use_deterministic_algorithms(poison)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
