"""Defaults of the classes in transformers; random models written by it: the same logits in fp32 after an import, and
after an export of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalin.errors import CheckpointError
from megalin.interop.weights.exporting import export_hf
from megalin.interop.weights.importing import import_hf
from megalin.interop.weights.layouts import LAYOUTS
from megalin.interop.weights.settings import Settings
from tests.interop.weights.models import read_run

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 12, "chunk_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-wide-heads": ("Llama", {"head_dim": 12}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", {"head_dim": 12, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3-windows": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "mamba2": ("Mamba2", MAMBA2 | {"n_groups": 1}),
    "mamba2-tied": ("Mamba2", MAMBA2 | {"n_groups": 1, "tie_word_embeddings": True}),
    "mamba2-groups": ("Mamba2", MAMBA2 | {"n_groups": 4, "num_heads": 8, "head_dim": 8}),
}


DEFAULTS = {
    "Llama": {"num_key_value_heads": 32, "intermediate_size": 11008},
    "Mistral": {"num_key_value_heads": 8, "intermediate_size": 14336, "sliding_window": 4096},
    "Qwen2": {"num_key_value_heads": 32, "intermediate_size": 22016, "vocab_size": 151936},
    "Qwen3": {"num_key_value_heads": 32, "intermediate_size": 22016, "vocab_size": 151936, "head_dim": 128},
}
"""Keys of config.json by the classes' own defaults in transformers 5.24, where these change the computation."""
COMMON = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def _model(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    layout = next(layout for layout in LAYOUTS if layout.architecture == f"{kind}ForCausalLM")
    return layout.to_model(layout.complete(Settings(values, "config.json")))


@pytest.mark.parametrize("kind", list(DEFAULTS))
def test_every_absent_key_has_the_default_of_its_class(kind: str):
    values = COMMON | DEFAULTS[kind]
    expected = _model(kind, values)
    for key in values:
        assert _model(kind, {name: value for name, value in values.items() if name != key}) == expected, key
    (block,) = expected["layers"]
    attention = block["sublayers"][0]
    assert attention["window"] == values.get("sliding_window")
    assert attention["num_key_value_heads"] == values["num_key_value_heads"]
    assert (attention["head_dim"] or 128, attention["rope_base"]) == (128, 10000.0)


def test_windows_of_qwen_begin_at_max_window_layers_or_follow_layer_types():
    slides = {"use_sliding_window": True, "sliding_window": 64, "hidden_size": 64, "num_hidden_layers": 30}

    def windows(**values: Any) -> list[int | None]:
        blocks = _model("Qwen2", slides | values)["layers"]
        return [block["sublayers"][0]["window"] for block in blocks for _ in range(block["repeat"])]

    assert windows() == [None] * 28 + [64] * 2
    assert windows(max_window_layers=0) == [64] * 30
    assert windows(max_window_layers=0, use_sliding_window=False) == [None] * 30
    assert windows(max_window_layers=0, sliding_window=None) == [None] * 30
    kinds = ["sliding_attention", "full_attention"] * 15
    assert windows(max_window_layers=0, layer_types=kinds) == [64, None] * 15
    with pytest.raises(CheckpointError, match="max_window_layers = None: must be an integer"):
        windows(max_window_layers=None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(DEFAULTS))
def test_the_classes_have_these_defaults(kind: str):
    transformers = pytest.importorskip("transformers")
    values = getattr(transformers, f"{kind}Config")().to_dict()
    assert _model(kind, {}) == _model(kind, values)
    assert {key: values[key] for key in COMMON | DEFAULTS[kind]} == COMMON | DEFAULTS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_logits_agree_in_both_directions(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    tokens = torch.randint(0, 300, (1, 200))
    with torch.no_grad():
        expected = theirs(tokens).logits
        ours = read_run(tmp_path / "run")(tokens).logits[..., :300]
        exported = back(tokens).logits
    for logits in (ours, exported):
        assert (logits - expected).norm() / expected.norm() < 1e-5
