"""Small models with the ablation switches of the papers (docs/ablations.md), for tests/model/test_ablations.py.

Each switch has a model of its own, compared with its definition in tests/references.py. Meshes take MOSAICS, which join
several switches in one model.
"""

from __future__ import annotations

from typing import Any

from megalin.model.config import ModelConfig
from tests.cases import GLU, RODIMUS, attention, model


def _alone(*mixers: dict[str, Any]) -> ModelConfig:
    return model({"sublayers": [*mixers, GLU], "repeat": 2})


LINEAR = {
    "no-decay-lrpe": attention("transnormer", decay="none", lrpe="rotation"),
    "no-temperature": attention("transnormer", decay="no_temperature"),
    "alibi-no-temperature": attention("tnl", decay="alibi_no_temperature", lrpe="cosine"),
    "no-gate": attention("transnormer", gate="none", output_norm="layernorm"),
    "no-low-rank-gate": attention("tnl", gate="none"),
    "no-activation": attention("transnormer", activation="none", lrpe="cosine"),
    "one-plus-elu": attention("tnl", activation="1+elu", lrpe="rotation"),
    "gate-of-residual": attention("tnl", gate_input="residual"),
    "gate-of-residual-weighted": attention("cosformer2", gate_input="residual", norm="rmsnorm", activation="1+elu"),
    "norm-attention": attention("transnormer", decay="none", gate="none", activation="1+elu"),
}
UNGATED = {name: value for name, value in RODIMUS.items() if name != "input_gate_rank"}
"""Rodimus without its input gate."""
RODIMUS_GATES = {
    "rodimus-no-gates": UNGATED | {"gates": []},
    "rodimus-selection": UNGATED | {"gates": ["selection"]},
    "rodimus-selection-temperature": UNGATED | {"gates": ["temperature", "selection"]},
    "rodimus-input": RODIMUS | {"gates": ["input"]},
    "rodimus-selection-input": RODIMUS | {"gates": ["selection", "input"], "query_key_input": "projected"},
    "rodimus-projected": RODIMUS | {"query_key_input": "projected"},
}
MODELS: dict[str, ModelConfig] = {name: _alone(mixer) for name, mixer in LINEAR.items()}
MODELS |= {name: model({"sublayers": [mixer]}) for name, mixer in RODIMUS_GATES.items()}

MOSAICS: dict[str, ModelConfig] = {
    "linear": model(*({"sublayers": [mixer, GLU]} for mixer in LINEAR.values())),
    "rodimus": model(*({"sublayers": [mixer]} for mixer in RODIMUS_GATES.values())),
}
