"""A DeepSpeed JSON merged with a run's config: contradictions are errors, "auto" and missing keys are filled in."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

from megalin.errors import ConfigError
from megalin.files import read_limited
from megalin.structured_text import MAX_BYTES, parse_json

SUPPORTED = SpecifierSet(">=0.19,<0.20")
"""Supported versions of deepspeed: the engine relies on internals, such as the location of optimizer states."""

UNSUPPORTED = {
    "amp": "train.dtype is the compute dtype",
    "torch_autocast": "train.dtype is the compute dtype",
    "scheduler": "the table [schedule] sets the learning rate",
    "activation_checkpointing": "train.recompute = true recomputes blocks",
    "tensor_parallel.autotp_size": "parallel.tp shards layers",
    "sequence_parallel_size": "parallel.cp shards sequences",
    "hybrid_engine": "it is for reinforcement learning",
    "elasticity": "the batch is train.global_batch_size on any number of ranks",
    "autotuning": "it ends the run by itself",
    "curriculum_learning": "data.phases sets the data of each step",
    "data_efficiency": "data.phases sets the data of each step",
    "progressive_layer_drop": "no layer of these models can be left out",
    "compression_training": "no layer of these models has a compressed form",
    "sparse_gradients": "the gradients of these models are dense",
    "compile.deepcompile": "its graphs do not support these models' collectives",
    "zero_optimization.zenflow": "it updates weights with parts of a step's gradient",
    "bf16.bf16_master_weights_and_grads": "weights at rest are fp32 and so are checkpoints",
    "bf16.bf16_optimizer_states": "moments are fp32 and so are checkpoints",
    "fp16.fp16_master_weights_and_grads": "weights at rest are fp32 and so are checkpoints",
    "fp16.auto_cast": "the model's inputs are token ids",
    "zero_optimization.cpu_offload": "it was renamed to offload_optimizer.device",
    "zero_optimization.cpu_offload_param": "it was renamed to offload_param.device",
    "checkpoint.load_universal": "checkpoints of a run folder load on any mesh as they are; universal ones of ZeRO 3 "
    "do not load into tensor parallelism",
}
"""Keys of the JSON that cannot be switched on: the reason, or the key of the config to use instead."""

STAGE_0_IN_HALF = (
    "this engine would accumulate gradients in that dtype and, with tensor parallelism, clip to a norm without the "
    "other ranks' shards"
)
"""Reason for the rejection of ZeRO stage 0 in bfloat16 and float16."""

NEVER_OFF = {
    "managed_gradient_accumulation": "train.global_batch_size determines the end of a step",
    "bf16.check_grad_overflow": "an update with a non-finite gradient would be applied",
    "zero_optimization.compute_grad_norm": "an update with a non-finite gradient would be applied",
}
"""Keys of the JSON that cannot be switched off: the reason."""

_READ = """aio bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile csv_monitor data_types
dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue expert_parallel
flops_profiler gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
graph_harvesting log_level memory_breakdown nebula optimizer pipeline prescale_gradients quantize_training
seq_parallel_communication_data_type sparse_attention steps_per_print tensorboard timers train_batch_size
train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"""
KNOWN = {key.partition(".")[0] for key in (*UNSUPPORTED, *NEVER_OFF)} | set(_READ.split())
"""Top-level keys of a DeepSpeed JSON that deepspeed reads; it ignores all others without a word."""


class RefusedKey(NamedTuple):
    """A key of a DeepSpeed JSON that no run may set, whatever its config says."""

    key: str
    """Dotted."""
    reason: str
    remedy: str = "remove it"


class Owned(NamedTuple):
    """A key of the JSON that the run's config determines."""

    key: str
    """Dotted."""
    name: str
    """The field of the config with its value, for messages."""
    value: Any


def check_deepspeed_version() -> None:
    """Raises ConfigError if deepspeed is not installed or its version is not supported; imports nothing."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f'train.engine = "deepspeed", but deepspeed is not installed; pip install "deepspeed{SUPPORTED}", or use '
            'train.engine = "fsdp2"'
        ) from None
    if version not in SUPPORTED:
        raise ConfigError(
            f'train.engine = "deepspeed" works with deepspeed {SUPPORTED}, not {version}; install one of these, or use '
            'train.engine = "fsdp2"'
        )


def resolve_deepspeed(path: str | None, owned: Sequence[Owned], *, stage: int | None) -> dict[str, Any]:
    """The engine's settings: the JSON at `path` (or none) with all keys that the run's config determines.

    Args:
        owned: keys that the config determines: the JSON may repeat them, omit them, or set them to "auto".
        stage: the ZeRO stage if the config sets one; else that of the JSON, else 3.

    Raises:
        ConfigError: a file that is not a JSON object, and all contradictions at once, naming both places.
    """
    document = {} if path is None else _read(path)
    if stage is not None:
        owned = [*owned, Owned("zero_optimization.stage", f"parallel.zero = {stage}", stage)]
    problems = [*_unknown(document), *_contradictions(document, owned)]
    settings = _without_auto(document)
    for item in owned:
        _set(settings, item.key, item.value)
    _fill(settings)
    problems += _stage_problems(document, settings)
    if problems:
        source = "train.engine = 'deepspeed'" if path is None else path
        raise ConfigError(f"{source}: {len(problems)} problem(s)\n" + "\n".join(f"  {line}" for line in problems))
    return settings


def refusals(document: Mapping[str, Any], *, stage: int) -> Iterator[RefusedKey]:
    """Yields the keys of a DeepSpeed JSON that this engine rejects at ZeRO `stage`."""
    for key, reason in UNSUPPORTED.items():
        if _is_on(_get(document, key)):
            yield RefusedKey(key, reason)
    if _get(document, "gradient_allreduce_op") not in (None, "mean"):
        yield RefusedKey("gradient_allreduce_op", "the loss is scaled for a mean")
    for key, reason in NEVER_OFF.items():
        if _get(document, key) is False:
            yield RefusedKey(key, reason)
    for key, least in (("zero_optimization.offload_optimizer", 1), ("zero_optimization.offload_param", 3)):
        device = _get(document, f"{key}.device") or "none"
        if device not in ("none", "auto", "cpu"):
            yield RefusedKey(f"{key}.device", "checkpoints are saved from host memory only", "use 'cpu'")
        elif device == "cpu" and stage < least:
            remedy = f"use stage {least} or more (parallel.zero), or remove it"
            yield RefusedKey(key, f"it has no effect at stage {stage}", remedy)


def _read(path: str) -> dict[str, Any]:
    try:
        document = parse_json(read_limited(Path(path), limit_bytes=MAX_BYTES, follow_links=True))
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.deepspeed_config = {path!r} is not a readable JSON file: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"train.deepspeed_config = {path!r} contains no JSON object, but {type(document).__name__}")
    if "bfloat16" in document:  # its older name
        document["bf16"] = document.pop("bfloat16")
    for key in ("zero_optimization", "bf16", "fp16", "data_types"):
        if not (isinstance(document.get(key, {}), dict) or document[key] == "auto"):
            raise ConfigError(
                f"train.deepspeed_config = {path!r}: {key} = {document[key]!r} is not an object; make it one"
            )
    return document


def nearest_key(key: str) -> str | None:
    """The known top-level key of a DeepSpeed JSON that is spelled like `key`; None if none is."""
    return next(iter(difflib.get_close_matches(key, sorted(KNOWN), n=1, cutoff=0.75)), None)


def _unknown(document: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(document.keys() - KNOWN):
        near = nearest_key(key)
        yield f"{key}: DeepSpeed has no such key and would ignore it; " + (
            f"did you mean {near}?" if near else "remove it"
        )


def _contradictions(document: Mapping[str, Any], owned: Sequence[Owned]) -> Iterator[str]:
    for item in owned:
        value = _get(document, item.key)
        if value not in (None, "auto", item.value):
            yield f'{item.key} = {value!r}, but {item.name}; make them equal, remove the key, or write "auto"'
    kind = _get(document, "optimizer.type")
    adam_w_mode = _get(document, "optimizer.params.adam_w_mode")
    if kind is not None and (str(kind).lower() not in ("adam", "adamw") or adam_w_mode is False):
        yield f"optimizer.type = {kind!r} is not the AdamW of [optimizer]; use 'AdamW', or remove the key"


def _stage_problems(document: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is rejected, or would silently have no effect, at the stage of `settings`, made from `document`."""
    stage = _get(settings, "zero_optimization.stage")
    if stage not in (0, 1, 2, 3):
        yield f"zero_optimization.stage = {stage!r} is not one of 0, 1, 2, 3"
        stage = 3  # the one that supports most
    elif stage == 0 and (half := _half_dtype(settings)):
        yield (
            f"zero_optimization.stage = 0 in {half}: {STAGE_0_IN_HALF}; use stage 1, 2 or 3 (parallel.zero), or "
            "train.engine = 'fsdp2'"
        )
    for key, reason, remedy in refusals(document, stage=stage):
        yield f"{key} = {json.dumps(_get(document, key))}: {reason}; {remedy}"


def _is_on(value: Any) -> bool:
    """True if a section or switch is on; for a section with `enabled`, that key alone decides."""
    if isinstance(value, Mapping):
        on = value.get("enabled")
        return on != "auto" and bool(on) if "enabled" in value else any(_is_on(item) for item in value.values())
    return value not in (None, False, 0, 1, "auto") or value is True


def _fill(settings: dict[str, Any]) -> None:
    """Sets a run's defaults where they differ from DeepSpeed's."""
    settings.pop("optimizer", None)  # checked above; the optimizer itself is passed in
    zero = settings.setdefault("zero_optimization", {})
    zero.setdefault("stage", 3)
    # Torch's optimizer for offloaded states; DeepSpeed would compile its own at startup.
    settings.setdefault("zero_force_ds_cpu_optimizer", False)
    settings.setdefault("log_level", "warning")
    if settings["bf16"]["enabled"]:
        settings["bf16"].setdefault("check_grad_overflow", True)
    if _half_dtype(settings):
        settings.setdefault("communication_data_type", "fp32")
        settings.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def _half_dtype(settings: Mapping[str, Any]) -> str:
    """The compute dtype of two bytes; empty for fp32."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    return next((name for key, name in names.items() if _get(settings, f"{key}.enabled")), "")


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return value


def _get(document: Mapping[str, Any], key: str) -> Any:
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _set(document: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for part in tables:
        table = document.get(part)
        if not isinstance(table, dict):
            table = document[part] = {}
        document = table
    document[last] = value
