"""A DeepSpeed JSON as megalin's tables; keys that only DeepSpeed's engine reads stay in a JSON for it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from megalin.errors import ConfigError
from megalin.interop.configs.imported import ImportedConfig, Verdict
from megalin.interop.configs.loss_scale import LossScaling, Setting, add_loss_scale
from megalin.structured_text import parse_json
from megalin.train.deepspeed_config import NEVER_OFF, STAGE_0_IN_HALF, UNSUPPORTED, nearest_key, refusals

_ADAM = ("adam", "adamw", "fusedadam", "cpuadam", "torchadam")
_PEAK = 0.001
"""Default peak learning rate of DeepSpeed's warmup schedules."""
_WARMUP = 1000
"""Default number of warmup steps of DeepSpeed's schedules."""
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""Types of schedule by DeepSpeed's."""
_PARAMETERS = {"lr": None, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Optimizer parameters and their defaults."""
_KEPT = {
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "data_types",
    "aio",
    "wall_clock_breakdown",
    "memory_breakdown",
    "flops_profiler",
    "comms_logger",
    "dump_state",
    "checkpoint",
    "timers",
    "steps_per_print",
    "disable_allgather",
    "disable_python_gc",
    "log_level",
    "gradient_allreduce_op",
}
"""Keys passed to the engine unchanged."""
_REASONS: dict[str, tuple[Verdict, str]] = {
    "tensorboard": ("no effect", "events are written into the run folder"),
    "csv_monitor": ("no effect", "metrics are written into the run folder"),
    "comet": ("no effect", "metrics are written into the run folder"),
    "eigenvalue": ("not available", "it belongs to compression, which is not available"),
    "sparse_attention": ("not available", "model.layers sets the kind of attention"),
    "weight_quantization": ("not available", "weights are not quantized in training"),
    "quantize_training": ("not available", "weights are not quantized in training"),
    "graph_harvesting": ("not available", "train.cuda_graphs launches the forwards and backwards of a step at once"),
    "expert_parallel": ("not available", "mixture of experts is not available"),
    "use_data_before_expert_parallelism": ("not available", "mixture of experts is not available"),
    "seq_parallel_communication_data_type": ("not available", "parallel.cp communicates in the computation's dtype"),
    "datastates_ckpt": ("not available", "checkpoints are megalin's own"),
    "nebula": ("not available", "checkpoints are megalin's own"),
    "pipeline": ("not available", "parallel.pp splits models into stages"),
    "compile": ("not available", "train.compile compiles blocks"),
    "dataloader_drop_last": ("no effect", "every step has a full batch"),
    "vocabulary_size": ("no effect", "set by model.vocab_size"),
}
"""Reasons for keys that the engine accepts and that change nothing in a run."""
_UNSUPPORTED_TABLES = {key.partition(".")[0] for key in (*UNSUPPORTED, *NEVER_OFF)}
"""Top-level keys of the settings that this engine does not support when on, or when off."""


def read_json(text: str, source: str) -> dict[str, Any]:
    """Parses a DeepSpeed config. Raises ConfigError if it is not a JSON object."""
    try:
        document = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{source}: invalid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must be a JSON object, not {type(document).__name__}; give DeepSpeed's config")
    return document


def add_deepspeed(document: Mapping[str, Any], imported: ImportedConfig) -> dict[str, Any]:
    """Reads a DeepSpeed config into the tables of a run of the engine "deepspeed".

    Returns:
        The JSON for `train.deepspeed_config`: the keys without a counterpart in the run's config. May be empty.
    """
    imported.set("train.engine", "deepspeed", "a DeepSpeed JSON")
    remaining = copy.deepcopy({("bf16" if key == "bfloat16" else key): value for key, value in document.items()})
    _add_batch(remaining, imported)
    _add_precision(remaining, imported)
    _add_optimizer(_table(remaining, "optimizer"), imported)
    _add_schedule(_table(remaining, "scheduler"), imported)
    _add_wandb(_table(remaining, "wandb"), imported)
    remaining["zero_optimization"] = zero = _add_zero(remaining.get("zero_optimization", {}), imported)
    _drop_unsupported(remaining, imported)
    rest = {"zero_optimization": zero} if zero else {}
    for key, value in remaining.items():
        if key in _KEPT:
            rest[key] = value
        elif key in _READ:
            continue
        elif key in _REASONS or key in _UNSUPPORTED_TABLES:
            if not _off(value):
                verdict, reason = _REASONS.get(key, ("no effect", "the run behaves this way without it"))
                imported.note(verdict, key, reason)
        else:
            near = nearest_key(key)
            hint = f"; did you mean {near}?" if near else ""
            imported.note("unknown", key, f"DeepSpeed has no such key{hint}")
    return rest


_READ = (
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "fp16",
    "optimizer",
    "scheduler",
    "wandb",
)


def _drop_unsupported(document: dict[str, Any], imported: ImportedConfig) -> None:
    """Removes keys that the engine does not support, and notes each with the engine's reason."""
    stage = imported.get("parallel.zero")
    for key, reason, _ in refusals(document, stage=stage if isinstance(stage, int) else 3):
        if key in _READ:
            continue
        *tables, name = key.split(".")
        table = document
        for part in tables:
            table = table[part]
        del table[name]
        imported.note("not available", key, reason)


def _table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _off(value: Any) -> bool:
    """True if a section or a switch is off."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value in (None, False, 0)


def _set(imported: ImportedConfig, key: str, value: Any, source: str) -> None:
    """Sets a value of the JSON; notes "auto", which Hugging Face's Trainer fills in, as something to fill in."""
    if value == "auto":
        imported.missing(key, source, f'only Hugging Face\'s Trainer fills in "auto"; give {key}=VALUE')
    elif value is not None:
        imported.set(key, value, source)


def _add_batch(document: Mapping[str, Any], imported: ImportedConfig) -> None:
    _set(imported, "train.global_batch_size", document.get("train_batch_size"), "train_batch_size")
    name = "train_micro_batch_size_per_gpu"
    _set(imported, "train.micro_batch_size", document.get(name), name)
    steps = document.get("gradient_accumulation_steps")
    if steps is not None and steps != "auto":
        text = "it follows from train.global_batch_size and train.micro_batch_size"
        imported.note("no effect", f"gradient_accumulation_steps {steps}", text)
        imported.hint("train.global_batch_size", f"{steps} times train.micro_batch_size times the data-parallel size")


def _add_precision(document: Mapping[str, Any], imported: ImportedConfig) -> None:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if _table(document, name).get("enabled") is True:
            imported.set("train.dtype", dtype, f"{name}.enabled")
        elif _table(document, name).get("enabled") == "auto":
            _set(imported, "train.dtype", "auto", f"{name}.enabled")
    fp16 = _table(document, "fp16")
    if fp16.get("enabled") is True:
        add_loss_scale(loss_scaling(fp16), imported)
    if clip := document.get("gradient_clipping", 1.0):
        _set(imported, "optimizer.max_grad_norm", clip, "gradient_clipping (1.0)")


def loss_scaling(fp16: Mapping[str, Any]) -> LossScaling:
    """The loss scaling of DeepSpeed's section `fp16`, with its defaults."""

    def setting(key: str, default: int) -> Setting:
        value = fp16.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        name = f"fp16.{key}" if key in fp16 else f"fp16.{key} (default)"
        return Setting(name, value if is_number else default)

    name, exponent = setting("initial_scale_power", 16)
    return LossScaling(
        static=setting("loss_scale", 0),
        initial=Setting(name, 2.0 ** min(exponent, 64)),
        window=setting("loss_scale_window", 1000),
        minimum=setting("min_loss_scale", 1),
        hysteresis=setting("hysteresis", 2),
    )


def _add_optimizer(table: Mapping[str, Any], imported: ImportedConfig) -> None:
    kind, parameters = table.get("type"), _table(table, "params")
    if kind is not None and str(kind).lower() not in _ADAM:
        text = "the optimizer is AdamW; learning rates of other optimizers do not carry over"
        imported.note("differs", f"optimizer.type {kind}", text)
    if parameters.get("adam_w_mode") is False:
        imported.note("differs", "optimizer.params.adam_w_mode", "weight decay is decoupled (AdamW)")
    for name, default in _PARAMETERS.items():
        if kind is not None:
            _set(imported, f"optimizer.{name}", parameters.get(name, default), f"optimizer.params.{name}")
    for name in parameters:
        if name not in (*_PARAMETERS, "adam_w_mode", "torch_adam", "bias_correction"):
            text = "the optimizer is AdamW with lr, betas, eps and weight_decay"
            imported.note("not available", f"optimizer.params.{name}", text)


def _add_schedule(table: Mapping[str, Any], imported: ImportedConfig) -> None:
    kind, parameters = table.get("type"), _table(table, "params")
    if kind is None:
        return
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        imported.note("not available", f"scheduler.type {kind}", "write the table schedule")
        return
    warmup, total = parameters.get("warmup_num_steps", _WARMUP), parameters.get("total_num_steps")
    _set(imported, "schedule.warmup_steps", warmup, "scheduler.params.warmup_num_steps")
    _set(imported, "train.steps", total, "scheduler.params.total_num_steps")
    if kind != "WarmupCosineLR" and (peak := parameters.get("warmup_max_lr", _PEAK)) != imported.get("optimizer.lr"):
        if imported.get("optimizer.lr") is not None:
            imported.note("differs", "scheduler.params.warmup_max_lr", f"the peak is optimizer.lr, not {peak}")
        else:
            _set(imported, "optimizer.lr", peak, "scheduler.params.warmup_max_lr")
    if parameters.get("warmup_type", "log") != "linear":
        imported.note("differs", "scheduler.params.warmup_type", "the warmup is linear, not logarithmic")
    start = _warmup_start(kind, parameters, imported)
    if start is not None:
        imported.set("schedule.warmup_start_ratio", *start)
    imported.set("schedule.type", _SCHEDULES[kind], f"scheduler.type {kind}")
    if kind == "WarmupCosineLR":
        imported.set("schedule.min_lr_ratio", parameters.get("cos_min_ratio", 0.0001), "scheduler.params.cos_min_ratio")
    elif kind == "WarmupDecayLR" and start is not None:  # it ends at the rate that it starts from
        imported.set("schedule.min_lr_ratio", *start)


def _warmup_start(kind: str, parameters: Mapping[str, Any], imported: ImportedConfig) -> tuple[float, str] | None:
    """Start of the warmup over the peak, and its key; None for zero or if it has to be filled in."""
    name = "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"
    value, source, peak = parameters.get(name), f"scheduler.params.{name}", imported.get("optimizer.lr")
    if value in (None, 0):
        return None
    if isinstance(value, int | float) and name == "warmup_min_ratio":
        return value, source
    if isinstance(value, int | float) and isinstance(peak, int | float) and peak:
        return value / peak, f"{source} over the peak"
    imported.missing("schedule.warmup_start_ratio", source, f"{value!r} is no ratio to the peak, optimizer.lr")
    return None


def _add_wandb(table: Mapping[str, Any], imported: ImportedConfig) -> None:
    if _off(table):
        return
    imported.set("logging.wandb_project", table.get("project", "deepspeed"), "wandb.project")
    for name, variable in (("team", "WANDB_ENTITY"), ("group", "WANDB_RUN_GROUP")):
        if table.get(name) is not None:
            imported.note("differs", f"wandb.{name}", f"set the environment variable {variable}")


def _add_zero(value: Any, imported: ImportedConfig) -> Any:
    """Sets `parallel.zero` from the stage; returns the other settings without "auto" values, the engine's default."""
    if not isinstance(value, dict):
        imported.set("parallel.zero", int(bool(value)), "zero_optimization")
        return {}
    stage = value.get("stage", 0)
    if stage == 0 and (half := imported.get("train.dtype")) in ("bfloat16", "float16"):
        imported.note("differs", "zero_optimization.stage 0", f"parallel.zero = 1; in {half} {STAGE_0_IN_HALF}")
        stage = 1
    _set(imported, "parallel.zero", stage, "zero_optimization.stage")
    return {name: setting for name, setting in value.items() if name != "stage" and setting != "auto"}
