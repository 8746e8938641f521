"""Lines above the first step of a run: its model, device, mesh and length, and warnings of suspicious values."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch.distributed as dist

from megalin.data.sources import Training
from megalin.model.build import make_model
from megalin.model.config import AnyModelConfig
from megalin.model.counts import Counts, count
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig
from megalin.train.environment import device_name
from megalin.train.float8 import describe_layers, float8_settings, planned_layers
from megalin.train.graph_choice import choice_line

MANY_EPOCHS = 4
"""Epochs of a source above which a run is warned: repeated data is then worth less than new data."""
CPU_FLOPS_PER_SECOND = 2e10
"""Rate of one core in fp32, roughly: 10 to 50 GFLOP/s."""
SLOW_STEP_SECONDS = 60.0
"""Seconds of a step on a CPU from which a run is warned."""


def start_lines(config: RunConfig, mesh: Mesh, data: Training, *, resumed_step: int) -> list[str]:
    """The lines, warnings last."""
    counted = count(make_model(config.model), config.data.sequence_length)
    return [*_facts(config, mesh, counted, resumed_step), *_warnings(config, mesh, data, counted)]


def mixer_types(model: AnyModelConfig) -> list[str]:
    """The types of the model's sub-layers, each once, in their order."""
    return list(dict.fromkeys(sublayer.type for _, block in model.blocks() for sublayer in block.sublayers))


def describe_model(model: AnyModelConfig, counted: Counts) -> str:
    """The mixers and sizes of a model in one line."""
    return (
        f"{', '.join(mixer_types(model))}; {counted.parameters:,} parameters, {model.num_layers} blocks, width "
        f"{model.hidden_size:,}, vocabulary {model.vocab_size:,}"
    )


def _facts(config: RunConfig, mesh: Mesh, counted: Counts, resumed_step: int) -> Iterator[str]:
    train, length = config.train, config.data.sequence_length
    yield f"model: {describe_model(config.model, counted)}"
    blocks = "compiled" if train.compile else "eager"
    yield f"device: {dist.get_world_size()} x {device_name(mesh.device)}, {train.dtype}, {blocks} blocks"
    ranks, environment = dist.get_world_size(), os.environ
    if (line := choice_line(config, device=mesh.device.type, world_size=ranks, environment=environment)) is not None:
        yield line
    if (settings := float8_settings(train)) is not None:
        layers = planned_layers(config.model, config.parallel, settings)
        yield f"matmuls: {describe_layers(layers, settings, train.dtype)}"
    zero = "" if mesh.zero is None or mesh.samples.size * mesh.cp.size == 1 else f", ZeRO {mesh.zero}"
    yield f"mesh: tp {mesh.tp.size}, cp {mesh.cp.size}, pp {mesh.pp.size}, dp {mesh.samples.size}{zero}, {train.engine}"
    tokens = train.global_batch_size * length
    done = f", {resumed_step:,} of them done" if resumed_step else ""
    yield (
        f"run: {train.steps:,} steps{done}; {tokens:,} tokens a step ({train.global_batch_size:,} x {length:,}), "
        f"{train.steps * tokens:,} in all"
    )
    yield "data: read: samples that the run takes; fraction: of all of them; empty: padding of packed samples"


def _warnings(config: RunConfig, mesh: Mesh, data: Training, counted: Counts) -> Iterator[str]:
    train = config.train
    for use in data.uses:
        if use.epochs > MANY_EPOCHS:
            yield (
                f"warning: {use.name} is read {use.epochs:,.1f} times; above {MANY_EPOCHS} epochs repeated data helps "
                "little. Use more data or fewer train.steps"
            )
    if mesh.device.type != "cpu":
        return
    if train.dtype != "float32":
        yield f'warning: train.dtype = "{train.dtype}" is slow on most CPUs; use "float32"'
    if train.compile:
        yield "warning: train.compile = true compiles for minutes on a CPU and gains little; use false"
    flops = counted.flops_per_token * train.global_batch_size * config.data.sequence_length
    seconds = flops / (CPU_FLOPS_PER_SECOND * (os.cpu_count() or 1))
    if seconds > SLOW_STEP_SECONDS:
        yield (
            f"warning: a step of {flops:.1e} FLOPs takes about {_rounded(seconds)} on {os.cpu_count()} cores; use a "
            "GPU, a smaller model, or a smaller train.global_batch_size or data.sequence_length"
        )


def _rounded(seconds: float) -> str:
    """A time in minutes or hours."""
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
