"""FP8 matmuls in a run's config: their settings, the checks before a run, and the line at its start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from megalin.errors import ConfigError
from megalin.model.build import make_model
from megalin.model.config import AnyModelConfig
from megalin.ops.dispatch.backend import Choice, report_choice
from megalin.parallel.collectives import Axis
from megalin.parallel.config import ParallelConfig
from megalin.parallel.float8_layers import Float8Layers, Float8Settings, check_capability, find_layers
from megalin.parallel.tensor_parallel import TensorParallel
from megalin.train.precision import mesh_problems

if TYPE_CHECKING:
    from megalin.train.config import TrainConfig


def float8_settings(train: TrainConfig) -> Float8Settings | None:
    """The settings of the FP8 matmuls; None without them."""
    if train.matmul_dtype is None:
        return None
    return Float8Settings(weight_gradient=train.float8_weight_gradient)


def check_float8_layers(model: AnyModelConfig, parallel: ParallelConfig, settings: Float8Settings | None) -> None:
    """Raises ConfigError for a mesh or a model that FP8 matmuls do not support; needs no process group."""
    if settings is not None:
        if problems := mesh_problems(parallel):
            raise ConfigError("\n".join(problems))
        planned_layers(model, parallel, settings)


def planned_layers(model: AnyModelConfig, parallel: ParallelConfig, settings: Float8Settings) -> Float8Layers:
    """The layers that multiply in FP8, and those too narrow for it. Raises ConfigError as `find_layers`."""
    whole = make_model(model, TensorParallel(Axis("tp", parallel.tp)))
    return find_layers(whole, whole.block_list(), settings)


def report_matmuls(model: AnyModelConfig, parallel: ParallelConfig, settings: Float8Settings, device: str) -> None:
    """Records for kernels.json how FP8 matmuls run on this type of device, and of which layers."""
    layers = describe_layers(planned_layers(model, parallel, settings), settings, "bfloat16")
    report_choice("scaled_matmul", Choice("torch._scaled_mm" if device == "cuda" else "reference", layers))


def check_float8_device(device: torch.device) -> None:
    """Raises ConfigError for a GPU without FP8 matmuls."""
    if device.type == "cuda":
        check_capability(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def describe_layers(layers: Float8Layers, settings: Float8Settings, dtype: str) -> str:
    """The layers of each matmul dtype in one line, with the reason why others are not in FP8."""
    narrow = f"{', '.join(_kinds(layers.narrow))} (narrower than {settings.min_width}), " if layers.narrow else ""
    gradients = "gradients of weights too" if settings.weight_gradient else f"gradients of weights in {dtype}"
    return (
        f"{len(layers.float8)} linear layers in FP8 ({', '.join(_kinds(layers.float8))}; {gradients}); in {dtype}: "
        f"{narrow}low-rank maps, the head"
    )


def _kinds(names: list[str]) -> list[str]:
    """The names without the index of the block, each once."""
    return list(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "", name) for name in names))
