"""The step that is timed, by either engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megalin.config import parse
from megalin.model.config import AnyModelConfig, EncoderConfig
from megalin.optim.adamw import OptimizerConfig, build_optimizer
from megalin.parallel.mesh import Mesh
from megalin.train.build import COMPUTE_DTYPES, TrainedModel, build_model
from megalin.train.config import RunConfig, check_launch
from megalin.train.deepspeed_engine import DeepSpeedEngine
from megalin.train.step import train_step
from train_benchmarks.batches import random_batches

OPTIMIZER = OptimizerConfig(lr=1e-4, max_grad_norm=1.0)


def build_step(
    arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh
) -> tuple[TrainedModel, Callable[[int], float]]:
    """The model with its initial weights, and its step of a number on random tokens, which returns the loss.

    Raises:
        ConfigError: what DeepSpeed cannot do, where that is the engine.
    """
    batches = random_batches(arguments, config, mesh)
    if arguments.engine == "deepspeed":
        engine = DeepSpeedEngine(run_config(arguments, config, mesh), mesh)
        return engine.model, lambda number: engine.step(batches, learning_rate=OPTIMIZER.lr, step=number).loss
    model = build_model(
        config,
        mesh,
        compute_dtype=COMPUTE_DTYPES[arguments.dtype],
        recompute=arguments.recompute,
        compile_blocks=arguments.compile,
        seed=0,
        length=arguments.length,
    )
    optimizer = build_optimizer(model, OPTIMIZER, no_decay=model.no_decay_names())
    return model, lambda number: train_step(model, optimizer, batches, mesh, max_grad_norm=1.0, step=number).loss


def run_config(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> RunConfig:
    """The arguments as a run on DeepSpeed's engine has them. Its data are named, not read."""
    data: dict[str, Any] = {"train": ["random tokens"], "sequence_length": arguments.length}
    if isinstance(config, EncoderConfig):
        data["masking"] = {"max_predictions": arguments.length}
    values = {
        "model": config.model_dump(),
        "data": data,
        "train": {
            "engine": arguments.engine,
            "deepspeed_config": arguments.deepspeed_config,
            "steps": arguments.warmup + arguments.steps,
            "global_batch_size": arguments.batch * arguments.micro_batches * mesh.samples.size,
            "micro_batch_size": arguments.batch,
            "dtype": arguments.dtype,
            "recompute": arguments.recompute,
            "compile": arguments.compile,
        },
        "optimizer": OPTIMIZER.model_dump(),
        "parallel": mesh.config.model_dump(),
    }
    run = parse(RunConfig, values, "command line")
    check_launch(run, dist.get_world_size())
    return run
