"""Import of the scripts of tools/ as modules."""

import sys
from pathlib import Path

import pytest

TOOLS = ("train_benchmarks", "benchmark_train", "benchmark_presets", "plot_training", "plot_parallel")


@pytest.fixture
def benchmark_tools(monkeypatch):
    """Makes the modules of the training benchmark importable during a test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in TOOLS]:
        del sys.modules[name]
