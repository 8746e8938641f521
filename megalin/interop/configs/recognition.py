"""Recognition of configs by the keys of their own system, and errors that name systems whose configs are not read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from megalin.errors import ConfigError
from megalin.interop.configs.imported import ImportedConfig

SUPPORTED = "Megatron-LM's scripts, commands and YAML, gpt-neox's YAML, and DeepSpeed's JSON"
"""Configs that are read, for error messages."""
_MAX_KEYS = 5000
_MODEL = "Hugging Face's config of a model"
_FOREIGN: dict[str, tuple[tuple[str, ...], ...]] = {
    _MODEL: (("architectures",), ("model_type", "hidden_size"), ("model_type", "vocab_size")),
    "Hugging Face's training arguments": (("per_device_train_batch_size",),),
    "Hugging Face Accelerate's config": (("compute_environment",), ("distributed_type", "mixed_precision")),
    "nanotron's config": (("parallelism", "tokens"), ("parallelism", "data_stages"), ("tokens", "data_stages")),
    "OLMo-core's config": (("train_module",),),
    "llm-foundry's config": (("train_loader",),),
    "OLMo's config": (("device_train_microbatch_size",), ("model.d_model", "max_duration")),
    "litgpt's config": (
        ("data.class_path",),
        ("tokenizer_dir", "logger_name"),
        ("model_name", "train.max_tokens"),
        ("checkpoint_dir", "train", "eval"),
        ("padded_vocab_size", "n_embd"),
    ),
    "NeMo's config": (("trainer", "model"),),
    "torchtune's config": (("model._component_",),),
    "LLaMA-Factory's config": (("model_name_or_path", "stage"), ("model_name_or_path", "finetuning_type")),
    "axolotl's config": (("base_model", "datasets"),),
    "MaxText's config": (("base_emb_dim",),),
    "lingua's config": (("dump_dir", "optim"),),
    "torchtitan's config": (("job", "training"), ("job", "model")),
    "megalin's own config": (("model", "data", "train"),),
}
"""Systems whose configs are not read: any of these groups of dotted keys, all of one group present."""
_REMEDIES = {
    _MODEL: "import its folder with the weights by `megalin import`",
    "NeMo's config": "its table model has Megatron-LM's names: give these as flags in quotes",
    "megalin's own config": "it needs no import",
}


def refuse_foreign(values: Mapping[Any, Any], source: str) -> None:
    """Raises ConfigError with the system's name for a config of another system than the supported ones."""
    for system, groups in _FOREIGN.items():
        if any(all(_has(values, key) for key in keys) for keys in groups):
            keys = ", ".join(next(keys for keys in groups if all(_has(values, key) for key in keys)))
            remedy = _REMEDIES.get(system)
            raise ConfigError(
                f"{source}: {system} ({keys}) is not supported; import-config reads {SUPPORTED}"
                + (f"; {remedy}" if remedy else "")
            )


def _has(values: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


@contextlib.contextmanager
def recognized_as(system: str, imported: ImportedConfig, source: str, *, keys: int) -> Iterator[None]:
    """Reads a config of `keys` keys inside the context.

    Raises:
        ConfigError: the config is of another system, which has none of its keys or lacks more than it has; or there are
            more than 5,000 keys.
    """
    if keys > _MAX_KEYS:
        raise ConfigError(f"{source}: {keys} keys or flags; a config has at most {_MAX_KEYS}: give the config of a run")
    before = imported.num_unknown
    yield
    unknown = imported.num_unknown - before
    if keys - unknown < max(1, unknown):
        raise ConfigError(
            f"{source}: not a config that import-config knows: {system} has {keys - unknown} of its {keys} keys; give "
            f"one of {SUPPORTED}"
        )
