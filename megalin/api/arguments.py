"""Arguments of the API: the model and the run that a value names, devices and dtypes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.generation import DtypeName
from megalin.layers.external_mixers import external_types
from megalin.model.config import AnyModelConfig, EncoderConfig, ModelConfig, parse_model
from megalin.model.presets import expand_preset, preset_table
from megalin.parallel.process_group import compute_device
from megalin.train.config import RunConfig, load_run_config
from megalin.train.config_file import own_mixers, read_config, resolve

ModelSource = AnyModelConfig | RunConfig | Mapping[str, Any] | str | os.PathLike[str]
"""A model: its config, that of a run, a table of either, a preset's name, or the path of a config file (.toml)."""
RunSource = RunConfig | Mapping[str, Any] | str | os.PathLike[str]
"""A run: its config, a table with its keys, or the path of a config file."""


def read_model(source: ModelSource) -> AnyModelConfig:
    """The model config of a source. A table with the key `model` is a run's, another one is a model's; both may name a
    preset as `preset`, whose keys their own ones replace.

    Raises:
        ConfigError: no such preset or file, or an invalid config; it lists all problems.
    """
    match source:
        case ModelConfig() | EncoderConfig():
            return source
        case RunConfig():
            return source.model
        case Mapping():
            return _model_of(source, "the model's config")
        case str() if not source.endswith(".toml"):
            return parse_model(preset_table(source), f"preset {source}")
        case str() | os.PathLike():
            values = read_config(Path(source))
            if "model" not in values:
                raise ConfigError(f"{source}: it has no table [model]; give the config file of a run")
            return _model_of(values, str(source))
    raise ConfigError(f"{source!r} names no model; give a preset's name, a config, a dict, or the path of a .toml file")


def _model_of(values: Mapping[str, Any], name: str) -> AnyModelConfig:
    if "model" not in values:
        return parse_model(expand_preset(values), name, list(external_types(values)))
    table = resolve(values, ())["model"]
    if isinstance(table, ModelConfig | EncoderConfig):
        return table
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name}: model = {table!r} is not a table; give its keys as a dict")
    return parse_model(table, name, own_mixers(name, table))


def read_run(source: RunSource) -> RunConfig:
    """The run config of a source.

    Raises:
        ConfigError: no such file, or an invalid config; it lists all problems.
    """
    match source:
        case RunConfig():
            return source
        case Mapping():
            return parse(RunConfig, resolve(source, ()), "the run's config", context=list(external_types(source)))
        case str() | os.PathLike():
            return load_run_config(Path(source), ())
    raise ConfigError(f"{source!r} is no run's config; give a RunConfig, a dict, or the path of a .toml file")


def read_device(device: str | torch.device | None) -> torch.device:
    """The device of an argument; None: this rank's GPU where torch sees one, else the CPU.

    Raises:
        ConfigError: no device of this name here.
    """
    if device is None:
        return compute_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f'device = {device!r} names no device; use "cpu", "cuda" or "cuda:N"') from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ConfigError(f'device = "{found}": megalin computes on CPUs and on GPUs with CUDA; use "cpu" or "cuda"')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(f'device = "{found}", but torch {torch.__version__} sees no GPU here; use "cpu"')
    if found.index is not None and found.index >= count:
        raise ConfigError(f'device = "{found}", but this host has {count} GPUs; use "cuda:0" to "cuda:{count - 1}"')
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def read_dtype(dtype: DtypeName | torch.dtype) -> DtypeName:
    """The name of a weights' dtype. Raises ConfigError for one that models do not have."""
    name = str(dtype).removeprefix("torch.")
    match name:
        case "float32" | "bfloat16" | "float16":
            return name
    raise ConfigError(f'dtype = {dtype!r}: weights have no such dtype here; use "float32", "bfloat16" or "float16"')
