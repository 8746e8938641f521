"""Mamba-2: sizes that do not fit, and ranges of its initial rates."""

import pytest
import torch
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.model.language_model import LanguageModel
from megalin.parallel.collectives import Axis
from megalin.parallel.tensor_parallel import TensorParallel
from tests.cases import MAMBA2, build, model


def test_head_width_that_does_not_divide_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"model\.layers\.0\.sublayers\.0\.head_dim = 7 does not divide twice model\.hidden_size = 96",
    ):
        LanguageModel(model({"sublayers": [MAMBA2 | {"head_dim": 7}]}))


def test_heads_that_the_axis_does_not_divide_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"the number of heads of model\.layers\.0\.sublayers\.0, .* = 12 is not divisible by parallel\.tp = 8",
    ):
        LanguageModel(model({"sublayers": [MAMBA2]}), TensorParallel(Axis("tp", 8)))


def test_rates_start_in_their_ranges():
    rates = build(model({"sublayers": [MAMBA2], "repeat": 8}), dtype=torch.float32).mixers()
    decay = torch.cat([mixer.full_precision.a_log.detach().exp() for mixer in rates])
    step = torch.cat([functional.softplus(mixer.full_precision.step_bias.detach()) for mixer in rates])
    for values, low, high in ((decay, 1.0, 16.0), (step, 1e-3, 1e-1)):
        assert values.min() >= low * (1 - 1e-5)
        assert values.max() <= high * (1 + 1e-5)
        assert values.max() > 5 * values.min()
