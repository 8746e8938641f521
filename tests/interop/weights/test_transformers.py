"""Random models written by transformers: the same logits in fp32 after an import, and after an export of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalin.interop.weights.exporting import export_hf
from megalin.interop.weights.importing import import_hf
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
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "mamba2": ("Mamba2", MAMBA2 | {"n_groups": 1}),
    "mamba2-tied": ("Mamba2", MAMBA2 | {"n_groups": 1, "tie_word_embeddings": True}),
    "mamba2-groups": ("Mamba2", MAMBA2 | {"n_groups": 4, "num_heads": 8, "head_dim": 8}),
}


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
