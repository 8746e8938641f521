"""Libraries that a baseline's model needs in addition to its own."""

import sys
from pathlib import Path

import pytest
import torch

from megalin.commands.base import model_from
from megalin.errors import ConfigError


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "train_benchmarks"]:
        del sys.modules[name]


def test_the_scan_that_a_baseline_needs_is_named(monkeypatch):
    from train_benchmarks import baselines

    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: name if name == "fla" else None)
    with pytest.raises(ConfigError, match="--baseline fla: without mamba_ssm, its model of family 'mamba2' allocates"):
        baselines.build_baseline("fla", model_from("mamba2-1b", []), device=torch.device("meta"))
