"""A gpt-neox YAML as megalin's tables: keys of the same meaning as Megatron-LM's flags, and the network by itself."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from megalin.interop.configs.deepspeed import loss_scaling
from megalin.interop.configs.flags import Flags, Reason
from megalin.interop.configs.imported import ImportedConfig
from megalin.interop.configs.megatron import add_run
from megalin.interop.configs.neox_model import MODEL_KEYS, add_neox_model
from megalin.interop.configs.recognition import recognized_as

_OWN_NAMES = {
    "pipe_parallel_size",
    "no_weight_tying",
    "pos_emb",
    "rotary_pct",
    "rotary_emb_base",
    "gpt_j_residual",
    "train_micro_batch_size_per_gpu",
    "output_layer_parallelism",
    "attention_config",
    "log_dir",
    "text_gen_type",
    "train_data_paths",
    "use_comet",
}
"""Keys that no other system's YAML has at its top level."""
_FLAGS = {
    "pipe_parallel_size": "--pipeline-model-parallel-size",
    "model_parallel_size": "--tensor-model-parallel-size",
    "sequence_parallel": "--sequence-parallel",
    "context_parallel_size": "--context-parallel-size",
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "batch_size": "--batch-size",
    "seq_length": "--seq-length",
    "train_iters": "--train-iters",
    "seed": "--seed",
    "lr_decay_style": "--lr-decay-style",
    "lr_decay_iters": "--lr-decay-iters",
    "min_lr": "--min-lr",
    "gradient_clipping": "--clip-grad",
    "clip_grad": "--clip-grad",
    "checkpoint_activations": "--checkpoint-activations",
    "log_interval": "--log-interval",
    "eval_interval": "--eval-interval",
    "eval_iters": "--eval-iters",
    "save_interval": "--save-interval",
    "exit_interval": "--exit-interval",
    "num_workers": "--num-workers",
    "split": "--split",
}
"""Megatron-LM's flags of the same meaning."""
_BESIDES = {
    "attention_dropout",
    "bf16",
    "checkpoint_factor",
    "checkpoint_scale",
    "data_path",
    "fp16",
    "gradient_accumulation_steps",
    "keep_last_n_checkpoints",
    "lr_decay_fraction",
    "merge_file",
    "optimizer",
    "precision",
    "tokenizer_type",
    "use_wandb",
    "vocab_file",
    "wandb_group",
    "wandb_host",
    "wandb_init_all_ranks",
    "wandb_project",
    "wandb_run_name",
    "wandb_team",
    "warmup",
    "weight_decay",
    "zero_optimization",
    *(f"{split}_data_{what}" for split in ("train", "valid", "test") for what in ("paths", "weights")),
}
"""Keys that this module reads by itself."""
_WARMUP, _WEIGHT_DECAY = 0.01, 0.1


def is_neox(values: Mapping[Any, Any]) -> bool:
    """True if a YAML's table is a config of gpt-neox."""
    return not _OWN_NAMES.isdisjoint(_names(values))


def add_neox(values: Mapping[Any, Any], imported: ImportedConfig) -> None:
    """Reads the run of a gpt-neox YAML; of several YAMLs, each later key replaces an earlier one."""
    settings = _names(values)
    flags = _flags(settings)
    with recognized_as("gpt-neox", imported, imported.source, keys=len(settings)):
        add_run(
            Flags(flags, imported),
            imported,
            ranks=None,
            model=lambda _, target: add_neox_model(settings, target),
        )
        _report(settings, imported)


def _names(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings by names with underscores; absent and null are the same."""
    return {str(key).replace("-", "_"): value for key, value in values.items() if value is not None}


def _flags(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Flags of a Megatron-LM run, with gpt-neox's defaults where they differ."""
    flags: dict[str, list[str]] = {}
    for key, name in _FLAGS.items():
        value = settings.get(key)
        if value is True:
            flags[name] = []
        elif value is not None and value is not False and not (name.endswith("-parallel-size") and value == 0):
            flags[name] = [str(value)]
    table = settings.get("optimizer")
    optimizer = table if isinstance(table, dict) else {}
    flags |= _optimizer_flags(optimizer, settings)
    flags |= _data_flags(settings)
    for kind in ("bf16", "fp16"):
        if _precision(settings) == kind:
            flags[f"--{kind}"] = []
            if kind == "fp16":
                flags |= _loss_scale_flags(settings)
    stage = settings.get("zero_optimization")
    flags["--zero-stage"] = [str(stage.get("stage", 0) if isinstance(stage, dict) else 0)]
    flags["--lr-warmup-fraction"] = [str(settings.get("warmup", _WARMUP))]
    decay, steps = settings.get("lr_decay_fraction"), settings.get("train_iters")
    if (
        isinstance(decay, int | float)
        and math.isfinite(decay)
        and isinstance(steps, int)
        and "lr_decay_iters" not in settings
    ):
        flags["--lr-decay-iters"] = [str(math.floor(steps * decay))]
    if "checkpoint_factor" in settings and settings.get("checkpoint_scale", "linear") == "linear":
        flags["--save-interval"] = [str(settings["checkpoint_factor"])]
    if settings.get("use_wandb"):
        flags["--wandb-project"] = [str(settings.get("wandb_project", "neox"))]
    return flags


def _loss_scale_flags(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    section = settings.get("fp16")
    scaling = loss_scaling(section if isinstance(section, dict) else {})
    return {
        "--loss-scale": [str(scaling.static.value)],
        "--initial-loss-scale": [str(scaling.initial.value)],
        "--loss-scale-window": [str(scaling.window.value)],
        "--min-loss-scale": [str(scaling.minimum.value)],
        "--hysteresis": [str(scaling.hysteresis.value)],
    }


def _optimizer_flags(optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, list[str]]:
    given = optimizer.get("params")
    parameters = given if isinstance(given, dict) else {}
    kind = str(optimizer.get("type", "adam")).lower()
    betas = parameters.get("betas", [0.9, 0.999])
    flags = {
        "--optimizer": ["adam" if kind in ("adam", "adamw", "cpu_adam", "cpu_torch_adam") else kind],
        "--adam-eps": [str(parameters.get("eps", 1e-8))],
        "--weight-decay": [str(settings.get("weight_decay", _WEIGHT_DECAY))],
    }
    if isinstance(betas, list) and len(betas) == 2:
        flags |= {f"--adam-beta{number}": [str(beta)] for number, beta in enumerate(betas, start=1)}
    if "lr" in parameters:
        flags["--lr"] = [str(parameters["lr"])]
    return flags


def _data_flags(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    if "data_path" in settings:
        flags["--data-path"] = [str(settings["data_path"])]
    for split in ("train", "valid", "test"):
        paths = _items(settings.get(f"{split}_data_paths"))
        weights = _items(settings.get(f"{split}_data_weights"))
        if paths and len(weights) == len(paths):
            flags[f"--{split}-data-path"] = [word for pair in zip(weights, paths, strict=True) for word in pair]
        elif paths:
            flags[f"--{split}-data-path"] = paths
    file, kind = str(settings.get("vocab_file", "")), settings.get("tokenizer_type", "GPT2BPETokenizer")
    if file and kind in ("HFTokenizer", "SPMTokenizer"):
        flags["--tokenizer-model"] = [file]
    return flags


def _items(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _precision(settings: Mapping[str, Any]) -> str:
    """bf16, fp16 or fp32: `precision`, or the section of DeepSpeed that is on, an older way for bf16 included."""
    named = {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}.get(str(settings.get("precision")))
    if named is not None:
        return named
    for kind in ("bf16", "fp16"):
        section = settings.get(kind)
        if isinstance(section, dict) and section.get("enabled"):
            return "bf16" if section.get("type") == "bfloat16" else kind
    return "fp32"


def _report(settings: Mapping[str, Any], imported: ImportedConfig) -> None:
    """Notes what no table has, and where gpt-neox's meaning of a key differs from Megatron-LM's."""
    imported.note("differs", "data", "samples are in Megatron-LM's order; gpt-neox has an older version of it")
    if "train_batch_size" not in settings:
        steps = settings.get("gradient_accumulation_steps", 1)
        text = f"{steps} times train.micro_batch_size times the data-parallel size"
        imported.hint("train.global_batch_size", text)
    if settings.get("lr_decay_style", "linear") == "linear" and settings.get("min_lr"):
        text = "the rate falls linearly to min_lr; gpt-neox's falls towards zero and stops at min_lr"
        imported.note("differs", "lr_decay_style linear", text)
    if settings.get("checkpoint_scale", "linear") != "linear":
        imported.note("not available", "checkpoint_scale", "set checkpoint.every_steps")
    if settings.get("merge_file") or (settings.get("vocab_file") and "tokenizer_type" not in settings):
        imported.note("differs", "vocab_file, merge_file", "give data.tokenizer, a tokenizer.json of the same ids")
    if (keep := settings.get("keep_last_n_checkpoints")) is not None:
        imported.set("checkpoint.keep_latest", keep, "keep_last_n_checkpoints")
    zero = settings.get("zero_optimization")
    if isinstance(zero, dict) and (zero.get("cpu_offload") or zero.get("offload_optimizer")):
        text = 'train.engine is "fsdp2"; DeepSpeed\'s offload needs train.engine = "deepspeed" and its JSON'
        imported.note("differs", "zero_optimization offload", text)
    known = {*_FLAGS, *_BESIDES, *MODEL_KEYS, *neox_reasons()}
    for key, value in settings.items():
        if key in neox_reasons():
            off = value is False or value in (0, {}, [])
            verdict, text = Reason("no effect", "it is off") if off else neox_reasons()[key]
            imported.note(verdict, key, text)
        elif key not in known:
            close = imported.nearest(key, sorted(known))
            hint = f"; did you mean {close}?" if close else "; is it a fork's, or an older version's?"
            imported.note("unknown", key, f"gpt-neox has no such key{hint}")


@functools.cache
def neox_reasons() -> Mapping[str, Reason]:
    """gpt-neox's keys without a megalin key of their own, by name."""
    text = (resources.files("megalin") / "interop/configs/neox_keys.toml").read_text(encoding="utf-8")
    return {
        name: Reason(group["verdict"], group["reason"])
        for group in tomllib.loads(text)["keys"]
        for name in group["names"].split()
    }
