"""Engine of the timed steps."""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist

from megalin.config import parse
from megalin.model.config import AnyModelConfig, EncoderConfig
from megalin.optim.adamw import OptimizerConfig
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig, check_launch
from megalin.train.deepspeed_engine import DeepSpeedEngine
from megalin.train.engine import Engine, FullyShardedEngine

OPTIMIZER = OptimizerConfig(lr=1e-4, max_grad_norm=1.0)


def build_engine(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> Engine:
    """Builds the engine named by the arguments, with the model's initial weights.

    Raises:
        ConfigError: an option that the engine does not support.
    """
    run = run_config(arguments, config, mesh)
    return DeepSpeedEngine(run, mesh) if arguments.engine == "deepspeed" else FullyShardedEngine(run, mesh)


def run_config(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> RunConfig:
    """Run config of the arguments. Its data are named, not read."""
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
            "cuda_graphs": arguments.cuda_graphs,
        },
        "optimizer": OPTIMIZER.model_dump(),
        "parallel": mesh.config.model_dump(),
    }
    run = parse(RunConfig, values, "command line")
    check_launch(run, dist.get_world_size())
    return run
