"""The scripts of tools/ as modules."""

import sys
from pathlib import Path

import pytest

TOOLS = ("train_benchmarks", "benchmark_train", "plot_training", "plot_parallel")


@pytest.fixture
def benchmark_tools(monkeypatch):
    """Those of the training benchmark, until the test ends."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in TOOLS]:
        del sys.modules[name]
