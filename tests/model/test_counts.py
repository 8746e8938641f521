"""Counts of a model from one or two blocks of a kind."""

from __future__ import annotations

import pytest

from megalin.model.build import make_model
from megalin.model.config import AnyModelConfig
from megalin.model.counts import count, count_config
from tests.cases import CASES
from tests.encoder_cases import CASES as ENCODERS

MODELS = {case.name: case.model for case in (*CASES, *ENCODERS)}


def repeated(model: AnyModelConfig) -> AnyModelConfig:
    """The model with 3 blocks of its first kind, 4 of its second, and so on."""
    layers = [block.model_copy(update={"repeat": 3 + index}) for index, block in enumerate(model.layers)]
    return model.model_copy(update={"layers": layers})


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_whole_model(name: str):
    model = repeated(MODELS[name])
    assert count_config(model, 96) == count(make_model(model), 96)
