"""Small models that external classes can express, as runs on disk, and the forward of each external class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from megalin.checkpoint.load import load
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.config import dumps, parse
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.train.config import RunConfig
from megalin.train.open_run import open_run
from tests.cases import build
from tests.interop.weights import external

VOCABULARY, WIDTH, HEADS = 300, 32, 4
SEQUENCE_LENGTH = 24


class ExternalModel(NamedTuple):
    """A model and the external class of its export."""

    format: str
    architecture: str
    forward: Callable[[external.Tensors, dict[str, Any], Tensor], Tensor]
    table: dict[str, Any]


def model_table(*sublayers: dict[str, Any], norm: str = "rmsnorm", eps: float = 1e-5, **fields: Any) -> dict[str, Any]:
    """[model] of three equal blocks of these sub-layers, with all norms of one kind."""
    norms = {"norm": norm, "norm_eps": eps}
    blocks = [{"sublayers": [sublayer | norms for sublayer in sublayers], "repeat": 3}]
    return {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "layers": blocks, "init_std": 0.2, **norms, **fields}


def _transnormerllm() -> dict[str, Any]:
    table = model_table(
        {"type": "transnormer", "num_heads": HEADS},
        {"type": "glu", "intermediate_size": 40},
        norm="srmsnorm",
        eps=1e-6,
        embedding_scale=WIDTH**0.5,
    )
    (block,) = table["layers"]
    attention, glu = block["sublayers"]
    first = {"sublayers": [attention | {"lrpe": "cosine"}, glu], "repeat": 1}
    return table | {"layers": [first, block | {"repeat": 2}]}


SWIGLU = {"type": "glu", "intermediate_size": 40, "activation": "silu"}
HGRN2 = {
    "type": "hgrn2",
    "num_heads": HEADS,
    "output_norm": "rmsnorm",
    "output_norm_eps": 1e-5,
    "scan_scale": "inverse_sqrt",
}
RODIMUS = {"type": "rodimus", "state_size": 6, "input_gate_rank": 5, "conv_width": 3}
SHARED_KEY = {"type": "shared_key_attention", "num_heads": HEADS, "window": 7, "residual": "two_hop"}
SOFTMAX = {"type": "softmax", "num_heads": HEADS, "num_key_value_heads": 2, "rope_base": 500.0}
BIASES = {"qkv_bias": True, "output_bias": True}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_length": 16}
MAMBA = {"type": "mamba1", "state_size": 5, "step_rank": 3, "conv_width": 3}
MAMBA2 = {"type": "mamba2", "head_dim": 8, "state_size": 5, "conv_width": 3}
GLA = {"type": "recurrence", "num_heads": HEADS, "decay": "vector", "decay_rank": 16, "expand_k": 0.5}
RETNET = {"type": "recurrence", "num_heads": HEADS, "decay": "fixed", "positions": "rope", "expand_v": 2.0}
WIDE = {"residual_dtype": "float32"}


def _qwen_windows() -> dict[str, Any]:
    attention = SOFTMAX | {"qk_norm": True}
    table = model_table(attention, SWIGLU)
    (block,) = table["layers"]
    windowed = [block["sublayers"][0] | {"window": 5}, block["sublayers"][1]]
    return table | {"layers": [{"sublayers": windowed, "repeat": 2}, block | {"repeat": 1}]}


MODELS = {
    "transnormerllm": ExternalModel("opennlplab", "TransnormerForCausalLM", external.transnormerllm, _transnormerllm()),
    "hgrn2": ExternalModel("fla", "HGRN2ForCausalLM", external.hgrn2, model_table(HGRN2, SWIGLU, eps=1e-3)),
    "rodimus-fla": ExternalModel("fla", "RodimusForCausalLM", external.rodimus_fla, model_table(RODIMUS, **WIDE)),
    "rodimus_plus-fla": ExternalModel(
        "fla", "RodimusForCausalLM", external.rodimus_fla, model_table(RODIMUS, SHARED_KEY, SWIGLU)
    ),
    "rodimus-codefuse": ExternalModel(
        "codefuse",
        "RodimusForCausalLM",
        external.rodimus_codefuse,
        model_table(RODIMUS, embedding_scale=6**0.5, **WIDE),
    ),
    "rodimus_plus-codefuse": ExternalModel(
        "codefuse", "RodimusForCausalLM", external.rodimus_codefuse, model_table(RODIMUS, SHARED_KEY, SWIGLU, **WIDE)
    ),
    "mamba": ExternalModel("transformers", "MambaForCausalLM", external.mamba, model_table(MAMBA, **WIDE)),
    "mamba2": ExternalModel("transformers", "Mamba2ForCausalLM", external.mamba2, model_table(MAMBA2)),
    "mamba2-groups": ExternalModel(
        "transformers", "Mamba2ForCausalLM", external.mamba2, model_table(MAMBA2 | {"num_groups": 2}, **WIDE)
    ),
    "llama": ExternalModel("transformers", "LlamaForCausalLM", external.llama, model_table(SOFTMAX, SWIGLU)),
    "llama3.1": ExternalModel(
        "transformers",
        "LlamaForCausalLM",
        external.llama,
        model_table(SOFTMAX | BIASES | {"rope_scaling": LLAMA3}, SWIGLU | {"bias": True}),
    ),
    "mistral": ExternalModel(
        "transformers", "MistralForCausalLM", external.llama, model_table(SOFTMAX | {"window": 7}, SWIGLU)
    ),
    "qwen2": ExternalModel(
        "transformers",
        "Qwen2ForCausalLM",
        external.llama,
        model_table(SOFTMAX | {"qkv_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0}}, SWIGLU),
    ),
    "qwen3": ExternalModel(
        "transformers",
        "Qwen3ForCausalLM",
        external.llama,
        model_table(SOFTMAX | {"qk_norm": True, "head_dim": 12}, SWIGLU),
    ),
    "qwen3-windows": ExternalModel("transformers", "Qwen3ForCausalLM", external.llama, _qwen_windows()),
    "gla-fla": ExternalModel("fla", "GLAForCausalLM", external.gla, model_table(GLA | {"conv_width": 3}, SWIGLU)),
    "retnet-fla": ExternalModel(
        "fla", "RetNetForCausalLM", external.retnet, model_table(RETNET, SWIGLU, tie_embeddings=False)
    ),
}
NAMES = list(MODELS)


def random_model(config: ModelConfig, *, noise: float = 0.1, seed: int = 0) -> LanguageModel:
    """Builds a random model in fp32; no norm, bias or bound keeps its initial value."""
    model = build(config, dtype=torch.float32, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = parameter[: config.vocab_size] if name in ("embedding.weight", "head.weight") else parameter
            rows.add_(noise * torch.randn(rows.shape, generator=generator))
    return model


def write_run(
    folder: Path, table: dict[str, Any], *, tokenizer: str | None = None, noise: float = 0.1
) -> LanguageModel:
    """Writes a run folder of a random model with a checkpoint of step 3, as training does; returns the model."""
    data = {"train": ["shard"], "sequence_length": SEQUENCE_LENGTH, "tokenizer": tokenizer}
    train = {"steps": 3, "global_batch_size": 1, "micro_batch_size": 1}
    config = parse(RunConfig, {"model": table, "data": data, "train": train, "optimizer": {"lr": 1e-3}}, "run")
    assert isinstance(config.model, ModelConfig)
    model = random_model(config.model, noise=noise)
    tensors = dict(weights(model)) | {f"{OPTIMIZER_PREFIX}state.embedding.weight.step": torch.tensor(3.0)}
    state = {"step": 3, "order": {}, "config": config.model_dump(mode="json")}
    save(folder / "checkpoints", step=3, tensors=tensors, state=state)
    (folder / "config.toml").write_text(dumps(config))
    return model


def read_run(folder: Path) -> LanguageModel:
    """Reads the model of a run folder as evaluation and generation do."""
    config, checkpoint = open_run(folder)
    assert isinstance(config.model, ModelConfig)
    model = build(config.model, dtype=torch.float32, seed=9)
    load(checkpoint, weights(model), ignore=(OPTIMIZER_PREFIX,))
    return model


def read_exported(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads the tensors and config.json of an exported folder."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    return tensors, json.loads((folder / "config.json").read_text())


def make_tokens() -> Tensor:
    """Random ids [T], including the last of the vocabulary."""
    tokens = torch.randint(0, VOCABULARY, (SEQUENCE_LENGTH,), generator=torch.Generator().manual_seed(5))
    tokens[3] = VOCABULARY - 1
    return tokens
