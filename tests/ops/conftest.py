"""Check of the launches of every test of ops in the interpreter against the committed list."""

from collections.abc import Iterator

import pytest
import torch

from tests.listed_launches import listed_launches
from tools.kernel_launches.recorder import interpreted_launches


@pytest.fixture(autouse=True)
def _listed() -> Iterator[None]:
    """Fails a test that launches a kernel in a form that is not compiled ahead of time."""
    if torch.cuda.is_available():
        yield
        return
    with listed_launches(interpreted_launches):
        yield
