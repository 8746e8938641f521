"""Libraries that a baseline's model needs in addition to its own."""

import pytest
import torch

from megalin.commands.base import model_from
from megalin.errors import ConfigError

pytestmark = pytest.mark.usefixtures("benchmark_tools")


@pytest.mark.parametrize("missing", ["mamba_ssm", "causal_conv1d"])
def test_the_package_that_a_baseline_needs_is_named(monkeypatch, missing):
    from train_benchmarks import baselines

    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(ConfigError, match=f"--baseline fla: .* 'mamba2' is fast on .*, and {missing} is not installed"):
        baselines.build_baseline("fla", model_from("mamba2-1b", []), device=torch.device("meta"))


def test_blocks_of_three_sublayers_have_no_baseline():
    from train_benchmarks import baselines

    with pytest.raises(ConfigError, match=r"no model of family 'rodimus \+ shared_key_attention \+ glu'; use a preset"):
        baselines.build_baseline("fla", model_from("rodimus_plus-1.6b", []), device=torch.device("meta"))
