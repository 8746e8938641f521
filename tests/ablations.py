"""Small models with the ablation switches of the papers (docs/ablations.md), for tests/model/test_ablations.py.

Each switch has a model of its own, compared with its definition in tests/references.py. MOSAIC joins switches in one
model for a mesh.
"""

from __future__ import annotations

from typing import Any

from megalin.model.config import EncoderConfig, ModelConfig
from tests import encoder_cases
from tests.cases import GLU, HIDDEN_SIZE, NUM_HEADS, RODIMUS, attention, model


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
    "sinusoidal": attention("tnl", absolute_positions="sinusoidal", decay="none"),
    "learned": attention("transnormer", absolute_positions="learned", max_positions=90, decay="none"),
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
HEADS = {"type": "softmax", "num_heads": NUM_HEADS}
GROUPS = {"type": "softmax", "num_heads": NUM_HEADS, "num_key_value_heads": 4}
SOFTMAX = {
    "window": HEADS | {"window": 7},
    "window-of-one": HEADS | {"window": 1, "num_sinks": 2},
    "window-groups": GROUPS | {"window": 5},
    "sinks": HEADS | {"window": 5, "num_sinks": 3},
    "sinks-groups": GROUPS | {"window": 3, "num_sinks": 6},
    "blocks": HEADS | {"block_size": 8},
    "blocks-groups": GROUPS | {"block_size": 5},
    "eight-heads-sinks": HEADS | {"num_heads": 8, "window": 4, "num_sinks": 2},
    "eight-heads-blocks": HEADS | {"num_heads": 8, "block_size": 5},
}
"""With eight heads, cp 3 does not divide the four of a rank of tp 2, which then gathers keys and values."""
MODELS: dict[str, ModelConfig] = {name: _alone(mixer) for name, mixer in LINEAR.items()}
MODELS |= {name: model({"sublayers": [mixer]}) for name, mixer in RODIMUS_GATES.items()}
MODELS |= {name: model({"sublayers": [mixer, GLU]}) for name, mixer in SOFTMAX.items()}
UNBOUNDED = attention("hgrn2", lower_bounds="none")
REAL_HGRN1 = attention("hgrn2", num_heads=HIDDEN_SIZE)
MODELS |= {
    "no-lower-bounds": _alone(UNBOUNDED),
    "hgrn1": model({"sublayers": [GLU]}, {"sublayers": [REAL_HGRN1]}),
    "no-lower-bounds-at-first": model({"sublayers": [UNBOUNDED]}, {"sublayers": [attention("hgrn2"), GLU]}),
}

DECAY_OF_VALUES = attention("recurrence", norm="srmsnorm", decay="vector", decay_side="both", decay_rank=3)
"""tests/layers/test_recurrence.py compares it with its definition."""

MESH_LAYERS = (
    LINEAR["no-decay-lrpe"],
    LINEAR["no-gate"],
    LINEAR["learned"],
    LINEAR["alibi-no-temperature"],
    LINEAR["gate-of-residual-weighted"],
    UNBOUNDED,
    RODIMUS_GATES["rodimus-no-gates"],
    RODIMUS_GATES["rodimus-selection-input"],
    SOFTMAX["window-groups"],
    SOFTMAX["sinks"],
    SOFTMAX["blocks-groups"],
    SOFTMAX["eight-heads-sinks"],
    SOFTMAX["eight-heads-blocks"],
    DECAY_OF_VALUES,
)
MOSAIC = model(*({"sublayers": [mixer]} for mixer in MESH_LAYERS), {"sublayers": [GLU]})
"""A switch of each kind that changes collectives or what ranks send, one a block."""

DENSE_ATTENTION = (
    encoder_cases.HEADS | {"relpe": "rope", "form": "linear"},
    encoder_cases.ONE_HEAD | {"relpe": "rope"},
    encoder_cases.ONE_HEAD | {"relpe": "g2", "relpe_frequencies": "printed"},
    encoder_cases.SHIFTED | {"relpe": "cosine_qk", "relpe_frequencies": "constant", "relpe_constant": 0.3},
    encoder_cases.HEADS | {"relpe_frequencies": "printed", "norm": "rmsnorm"},
    encoder_cases.LOCAL | {"relpe": "none", "form": "linear"},
    UNBOUNDED | {"type": "two_way_hgrn2"},
)
ENCODER_MOSAIC: EncoderConfig = encoder_cases.model(*DENSE_ATTENTION)
"""DenseAttention's switches; tests/layers/test_dense_attention_variants.py compares each with its definition."""
