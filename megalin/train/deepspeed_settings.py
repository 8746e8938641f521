"""DeepSpeed's JSON settings of a run, from its config."""

from __future__ import annotations

import math
from typing import Any

from megalin.train.config import RunConfig
from megalin.train.deepspeed_config import Owned, resolve_deepspeed
from megalin.train.precision import LossScaleConfig


def deepspeed_settings(config: RunConfig, world_size: int | None) -> dict[str, Any]:
    """DeepSpeed's JSON settings on `world_size` ranks: `train.deepspeed_config` merged with the rest of the config.
    None: without the accumulation, the one key that depends on the ranks.

    DeepSpeed multiplies micro-batches by the ranks of the data axis: with context parallelism, whose ranks share
    samples, its train_batch_size is parallel.cp times train.global_batch_size.

    Raises:
        ConfigError: every key of the file that contradicts the config or that no run may set.
    """
    train, optimizer, parallel = config.train, config.optimizer, config.parallel
    clip = "is left out" if optimizer.max_grad_norm is None else f"= {optimizer.max_grad_norm}"
    owned = [
        Owned("train_batch_size", f"train.global_batch_size = {train.global_batch_size}", train.global_batch_size),
        Owned(
            "train_micro_batch_size_per_gpu",
            f"train.micro_batch_size = {train.micro_batch_size}",
            train.micro_batch_size,
        ),
        *([] if world_size is None else [_accumulation(config, world_size)]),
        Owned("gradient_clipping", f"optimizer.max_grad_norm {clip}", optimizer.max_grad_norm or 0.0),
        Owned("bf16.enabled", f'train.dtype = "{train.dtype}"', train.dtype == "bfloat16"),
        Owned("fp16.enabled", f'train.dtype = "{train.dtype}"', train.dtype == "float16"),
    ]
    if train.dtype == "float16":
        owned += deepspeed_loss_scale(train.loss_scale or LossScaleConfig())
    values = {**optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"}), "bias_correction": True}
    for key, value in values.items():
        name = "AdamW corrects its moments" if key == "bias_correction" else f"optimizer.{key} = {value}"
        owned.append(Owned(f"optimizer.params.{key}", name, value))
    if train.compile:
        # ZeRO 3's linear layers recompile for each weight; blocks share kernels that rely on an alignment.
        owned.append(Owned("zero_optimization.memory_efficient_linear", "train.compile = true", False))
        owned.append(Owned("zero_optimization.parameter_alignment", "train.compile = true", True))
    settings = resolve_deepspeed(train.deepspeed_config, owned, stage=parallel.zero)
    if train.dtype == "float16":  # of the first step; the engine sets it before each one
        settings["fp16"] = {"enabled": True, "loss_scale": (train.loss_scale or LossScaleConfig()).initial}
    return settings | {"train_batch_size": train.global_batch_size * parallel.cp}


def _accumulation(config: RunConfig, world_size: int) -> Owned:
    train, samples = config.train, world_size // (config.parallel.tp * config.parallel.cp)
    accumulation = train.global_batch_size // (train.micro_batch_size * samples)
    name = (
        f"train.global_batch_size = {train.global_batch_size} over {samples} groups of ranks that read different "
        f"samples, {train.micro_batch_size} at a time, takes {accumulation}"
    )
    return Owned("gradient_accumulation_steps", name, accumulation)


def deepspeed_loss_scale(config: LossScaleConfig) -> list[Owned]:
    """The keys of a DeepSpeed JSON for this loss scaling."""
    exponent = round(math.log2(config.initial))
    name = "train.loss_scale"
    return [
        Owned("fp16.loss_scale", f"{name} is dynamic", 0),
        Owned("fp16.initial_scale_power", f"{name}.initial = {config.initial:g} = 2^{exponent}", exponent),
        Owned("fp16.loss_scale_window", f"{name}.growth_interval = {config.growth_interval}", config.growth_interval),
        Owned("fp16.min_loss_scale", f"{name}.minimum = {config.minimum:g}", config.minimum),
        Owned("fp16.hysteresis", f"{name} is halved at every overflow", 1),
    ]
