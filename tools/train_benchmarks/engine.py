"""Run config of the timed steps, and their engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalin.commands.base import read_values
from megalin.config import parse
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig
from megalin.train.config_file import own_mixers
from megalin.train.deepspeed_engine import DeepSpeedEngine
from megalin.train.engine import Engine, FullyShardedEngine
from megalin.train.launch_checks import check_launch

_TRAIN = ("engine", "deepspeed_config", "global_batch_size", "micro_batch_size", "seed", "dtype", "recompute")
KEYS = (
    *("model.*", "parallel.*", "optimizer.*", "data.sequence_length"),
    *(f"train.{key}" for key in (*_TRAIN, "compile", "cuda_graphs", "matmul_dtype", "float8_weight_gradient")),
)
"""Keys of the run config that the timed steps depend on."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"train": ["random tokens"], "sequence_length": 8192},
    "train": {"steps": 1, "micro_batch_size": 4, "dtype": "bfloat16"},
    "optimizer": {"lr": 1e-4, "max_grad_norm": 1.0},
}
"""Tables of a preset or of a file without [train]. Its data are named, not read."""


def run_config(name: str, overrides: Sequence[str], world_size: int) -> RunConfig:
    """Run config of a config file, or of a preset and `DEFAULTS` with one micro-batch a step, with overrides of `KEYS`.

    Raises:
        ConfigError: as `load_run_config` and `check_launch`, or an override of another key.
    """
    values = read_values(name, overrides, keys=KEYS, defaults=DEFAULTS)
    train, data = values["train"], values["data"]
    if values["model"].get("kind") == "encoder" and isinstance(data, dict):
        special = {"pad_token": 0, "cls_token": 1, "sep_token": 2, "mask_token": 3}
        data.setdefault("masking", {"max_predictions": 1, **special})
    one_micro_batch = isinstance(train, dict) and "global_batch_size" not in train
    if one_micro_batch:
        train["global_batch_size"] = train.get("micro_batch_size")
    run = parse(RunConfig, values, name, context=own_mixers(name, values))
    if one_micro_batch:
        data_size = world_size // (run.parallel.tp * run.parallel.cp * run.parallel.pp)
        size = run.train.micro_batch_size * data_size
        run = run.model_copy(update={"train": run.train.model_copy(update={"global_batch_size": size})})
    check_launch(run, world_size)
    return run


def build_engine(run: RunConfig, mesh: Mesh) -> Engine:
    """Builds the run's engine, with the model's initial weights."""
    return DeepSpeedEngine(run, mesh) if run.train.engine == "deepspeed" else FullyShardedEngine(run, mesh)
