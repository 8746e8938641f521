"""Cutting a decoder into stages: by cost, every parameter somewhere under its name, and what cannot be cut."""

from __future__ import annotations

import pytest

from megalin.errors import ConfigError
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset
from megalin.model.stack import Stage
from megalin.model.stages import _even_cut, plan_stages
from tests.cases import CASES
from tests.cases import Case as MixerCase


def lengths(costs: list[int], parts: int) -> list[int]:
    return [len(part) for part in _even_cut(costs, parts)]


def test_largest_stage_is_as_small_as_it_can_be():
    assert lengths([1] * 8, 4) == [2, 2, 2, 2]
    assert lengths([1, 1, 1, 1, 1, 1, 1, 4], 3) in ([3, 4, 1], [4, 3, 1])  # a head that costs three layers
    assert lengths([9, 1, 1, 1], 2) == [1, 3]


def test_layers_beyond_the_even_share_are_spread():
    assert sorted(lengths([1] * 10, 4)) == [2, 2, 3, 3]


def test_one_layer_a_stage():
    assert _even_cut([5, 1, 7], 3) == [range(0, 1), range(1, 2), range(2, 3)]


def test_head_takes_layers_from_the_last_stage():
    plan = plan_stages(load_preset("tnl-7b").model, 4, length=8192)
    assert [len(layers) for layers in plan.layers] == [8, 8, 9, 7]
    assert max(plan.costs) / sum(plan.costs) < 0.27
    whole = LanguageModel(load_preset("tnl-7b").model)
    work = sum(plan.costs) - 2 * whole.config.hidden_size
    assert work == whole.forward_flops(8192)


def test_plan_reads_as_lines():
    lines = plan_stages(load_preset("tnl-7b").model, 3, length=8192).lines()
    assert lines[0].startswith("stage 0: layers 0 to 10 and the embedding, 3")
    assert lines[1].startswith("stage 1: layers 11 to 21, 3")
    assert lines[2].startswith("stage 2: layers 22 to 31 and the head, 3")


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.name)
def test_stages_together_hold_every_parameter_by_its_name(row: MixerCase):
    whole = {name: tuple(parameter.shape) for name, parameter in LanguageModel(row.model).named_parameters()}
    plan = plan_stages(row.model, 2, length=64)
    held: dict[str, list[int]] = {}
    for number, layers in enumerate(plan.layers):
        stage = LanguageModel(row.model, stage=Stage(number, 2, layers))
        for name, parameter in stage.named_parameters():
            assert tuple(parameter.shape) == whole[name]
            held.setdefault(name, []).append(number)
    assert held.keys() == whole.keys()
    assert {name: stages for name, stages in held.items() if len(stages) > 1} == plan.holders


def test_tied_table_and_bounds_of_all_layers_are_held_by_several_stages():
    row = next(row for row in CASES if row.name == "hgrn2")
    assert plan_stages(row.model, 2, length=64).holders == {
        "embedding.weight": [0, 1],
        "shared.hgrn2.rows.gamma": [0, 1],
    }
    untied = next(row for row in CASES if row.name == "hgrn2-fla")
    assert list(plan_stages(untied.model, 2, length=64).holders) == ["shared.hgrn2.rows.gamma"]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(
        ConfigError, match=r"3 stages, but the model has 2 layers and each stage needs one; use at most 2"
    ):
        plan_stages(CASES[0].model, 3, length=64)


def test_encoder_is_refused():
    with pytest.raises(ConfigError, match=r'model\.kind = "encoder": an encoder cannot be cut into stages'):
        plan_stages(load_preset("danet-small").model, 2, length=64)
