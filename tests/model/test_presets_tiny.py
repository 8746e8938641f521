"""The tiny presets: sizes for CPUs, with the mixers of their families."""

import pytest

from megalin.model.build import make_model
from megalin.model.presets import load_preset, preset_names

# A larger preset of each family.
FAMILIES = {
    "transnormerllm": "transnormerllm-385m-64k",
    "tnl": "tnl-70m",
    "hgrn2": "hgrn2-70m",
    "cosformer2": "cosformer2-70m",
    "llama": "transformerpp-125m",
    "mamba2": "mamba2-410m",
    "rodimus": "rodimus-125m",
    "rodimus_plus": "rodimus_plus-125m",
    "danet": "danet-small",
    "bert": "bert-base",
}


def test_every_tiny_preset_is_checked_here():
    assert {f"{family}-tiny" for family in FAMILIES} <= set(preset_names())


@pytest.mark.parametrize("family", FAMILIES)
def test_size_and_sublayers(family: str):
    tiny, large = load_preset(f"{family}-tiny").model, load_preset(FAMILIES[family]).model
    assert 4e6 < make_model(tiny).num_parameters() < 5e6
    assert tiny.kind == large.kind
    fields = {"type", "norm", "residual", "activation", "lrpe"}
    kinds = [[sublayer.model_dump(include=fields) for sublayer in block.sublayers] for block in tiny.layers]
    assert kinds == [[sublayer.model_dump(include=fields) for sublayer in block.sublayers] for block in large.layers]
