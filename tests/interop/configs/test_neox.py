"""Import of gpt-neox's YAMLs, and the refusal of NeMo's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.interop.configs.flags import reasons
from megalin.interop.configs.imported import ImportedConfig
from megalin.interop.configs.neox import add_neox, is_neox, neox_reasons
from megalin.interop.configs.reading import import_config
from megalin.train.config import RunConfig

# The keys of Pythia 1.4B as released, which has both spellings of a key and the values of DeepSpeed.
PYTHIA = {
    "pipe-parallel-size": 1,
    "model-parallel-size": 2,
    "num-layers": 24,
    "hidden-size": 2048,
    "num-attention-heads": 16,
    "seq-length": 2048,
    "max-position-embeddings": 2048,
    "pos-emb": "rotary",
    "rotary-pct": 0.25,
    "no-weight-tying": True,
    "gpt-j-residual": True,
    "output-layer-parallelism": "column",
    "attention-config": [[["flash"], 24]],
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.9, 0.95], "eps": 1.0e-8}},
    "min_lr": 0.00002,
    "zero_optimization": {"stage": 1, "overlap_comm": True, "cpu_offload": False},
    "train_batch_size": 1024,
    "train_micro_batch_size_per_gpu": 16,
    "num_workers": 1,
    "checkpoint-activations": True,
    "gradient_clipping": 1.0,
    "weight-decay": 0.1,
    "hidden-dropout": 0,
    "attention-dropout": 0,
    "fp16": {"fp16": True, "enabled": True, "type": "bfloat16"},
    "train-iters": 143000,
    "lr-decay-iters": 143000,
    "lr-decay-style": "cosine",
    "warmup": 0.01,
    "checkpoint-factor": 1000,
    "keep-last-n-checkpoints": 4,
    "eval-interval": 500,
    "eval-iters": 10,
    "train-data-paths": ["a", "b"],
    "train-data-weights": [1.0, 3.0],
    "valid-data-paths": ["c"],
    "tokenizer-type": "HFTokenizer",
    "vocab-file": "20B_tokenizer.json",
    "vocab-size": 50277,
}
LLAMA = {
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1.0e-6,
    "activation": "swiglu",
    "intermediate_size": 32768,
    "hidden-size": 4096,
    "num-attention-heads": 32,
    "num_kv_heads": 8,
    "mlp_multiple_of": 256,
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "rotary-pct": 1,
    "gpt-j-residual": False,
    "init_method": "normal",
    "output_layer_init_method": "scaled_normal",
}


def _imported(values: dict[str, Any]) -> ImportedConfig:
    imported = ImportedConfig("run.yml")
    assert is_neox(values)
    add_neox(values, imported)
    imported.check()
    assert imported.complete, imported.report()
    return imported


def _differences(imported: ImportedConfig) -> set[str]:
    return {note.key for note in imported.notes if note.verdict in ("differs", "not available", "unknown")}


def test_pythia_is_read_with_its_own_values():
    imported = _imported(PYTHIA)
    config = parse(RunConfig, imported.values, "run.yml")
    (block,) = config.model.layers
    attention, mlp = block.sublayers
    assert (block.repeat, config.model.hidden_size, config.model.vocab_size) == (24, 2048, 50277)
    assert (mlp.type, mlp.intermediate_size, mlp.activation, mlp.bias) == ("ffn", 8192, "gelu", True)
    assert (attention.num_heads, config.model.norm, config.model.norm_eps) == (16, "layernorm", 1e-5)
    assert (config.model.tie_embeddings, config.model.init_std) == (False, math.sqrt(2 / (5 * 2048)))
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (2e-4, [0.9, 0.95], 0.1)
    assert (config.schedule.type, config.schedule.warmup_steps) == ("cosine", 1430)
    assert config.schedule.min_lr_ratio == pytest.approx(0.1)
    assert (config.parallel.tp, config.parallel.pp, config.parallel.zero) == (2, 1, 1)
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (1024, 16)
    assert (config.train.steps, config.train.dtype, config.train.recompute) == (143000, "bfloat16", True)
    assert (config.checkpoint.every_steps, config.checkpoint.keep_latest) == (1000, 4)
    assert [(source.paths, source.weight) for source in config.data.sources] == [(["a"], 1.0), (["b"], 3.0)]
    assert (config.data.validation, config.data.tokenizer) == (["c"], "20B_tokenizer.json")
    assert _differences(imported) == {
        "data",
        "gpt_j_residual",
        "output_layer_init_method wang_init",
        "rotary_pct 0.25",
    }


def test_llama_has_no_difference_but_the_order_of_samples():
    imported = _imported(PYTHIA | LLAMA)
    attention, glu = imported.get("model.layers")[0]["sublayers"]
    assert (glu["type"], glu["activation"], glu["bias"]) == ("glu", "silu", False)
    assert glu["intermediate_size"] == 11008  # LLaMA 7B's
    assert (attention["num_key_value_heads"], attention["norm"], attention["norm_eps"]) == (8, "rmsnorm", 1e-6)
    assert (imported.get("model.init_std"), imported.get("model.output_init")) == (0.02, "scaled_by_depth")
    assert _differences(imported) == {"data"}


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"precision": "bfloat16", "fp16": None}, "train.dtype", "bfloat16"),
        ({"bf16": {"enabled": True}, "fp16": None}, "train.dtype", "bfloat16"),
        ({"fp16": None}, "train.dtype", "float32"),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "train.dtype", "float16"),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "train.loss_scale.initial", 4096.0),
        ({"warmup": None}, "schedule.warmup_steps", 1430),
        ({"lr-decay-iters": None, "lr-decay-fraction": 0.5, "train-iters": 200}, "train.steps", 200),
        ({"hidden-dropout": 0.1}, "model.embedding_dropout", 0.1),
        ({"use_wandb": True, "wandb_project": "x"}, "logging.wandb_project", "x"),
        ({"pipe-parallel-size": 0}, "parallel.pp", None),
        ({"activation": "relu"}, "model.layers.0.sublayers.1.activation", "relu"),
        ({"bias_gelu_fusion": True}, "model.layers.0.sublayers.1.activation", "gelu_tanh"),
        ({}, "model.layers.0.sublayers.0.output_bias", True),
        ({"sliding_window_width": 1024}, "model.layers.0.sublayers.0.window", 1025),
        ({"expansion_factor": 3}, "model.layers.0.sublayers.1.intermediate_size", 6144),
    ],
)
def test_key_becomes_ours(values: dict[str, Any], key: str, expected: Any):
    found: Any = _imported(PYTHIA | values).values
    for part in key.split("."):
        found = found[int(part)] if isinstance(found, list) else found.get(part)
    assert found == expected


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"norm": "scalenorm"}, "norm scalenorm"),
        ({"pos_emb": "alibi"}, "pos_emb alibi"),
        ({"activation": "geglu"}, "activation geglu"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"attention_config": [[["mamba"], 24]]}, "attention_config mamba"),
        ({"init_method": "orthogonal"}, "init_method orthogonal"),
        ({"lr_decay_style": "linear"}, "lr_decay_style linear"),
        ({"use_bias_in_norms": False}, "use_bias_in_norms false"),
        ({"checkpoint_scale": "log"}, "checkpoint_scale"),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, "zero_optimization offload"),
        ({"merge-file": "merges.txt"}, "vocab_file, merge_file"),
        ({"moe_num_experts": 8}, "moe_num_experts"),
        ({"num_layer": 2}, "num_layer"),
    ],
)
def test_key_without_an_exact_counterpart_is_reported(values: dict[str, Any], key: str):
    base = {name: value for name, value in PYTHIA.items() if name.replace("-", "_") not in values}
    assert key in _differences(_imported(base | values))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"hidden-size": "${W}"}, "hidden_size"),
        ({"init_method_std": "x"}, "init_method_std"),
        ({"expansion_factor": float("inf"), "lr_decay_fraction": float("nan")}, "expansion_factor"),
    ],
)
def test_values_of_another_type_are_to_be_filled_in(values: dict[str, Any], key: str):
    imported = ImportedConfig("run.yml")
    add_neox(PYTHIA | {"init_method": "normal"} | values, imported)
    assert key in {note.key for note in imported.notes if note.verdict == "fill in"}


def test_file_is_recognized_and_nemo_is_refused(tmp_path: Path):
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(PYTHIA))
    imported = import_config(str(file), tmp_path / "run.toml", variables={})
    assert imported.get("optimizer.betas") == [0.9, 0.95]
    file.write_text(yaml.safe_dump({"trainer": {"max_steps": 5}, "model": {"hidden_size": 8}}))
    with pytest.raises(ConfigError, match=r"NeMo's config \(trainer, model\)"):
        import_config(str(file), tmp_path / "other.toml", variables={})


def test_flags_of_megatron_are_not_taken_for_gpt_neox():
    assert not is_neox({name.removeprefix("--"): 1 for name in reasons()})
    assert not is_neox({"language_model": {"num_layers": 2}, "model_parallel": {"fp16": False}})
    assert len(neox_reasons()) > 200
