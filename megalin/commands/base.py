"""The config, checkpoints and mesh that a command's arguments name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalin.config import apply_overrides, parse
from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, parse_model
from megalin.model.presets import preset_table
from megalin.parallel.config import ParallelConfig
from megalin.train.config_file import own_mixers, read_config, resolve

if TYPE_CHECKING:
    from megalin.train.open_run import Steps


def steps_option(arguments: argparse.Namespace) -> Steps:
    """The checkpoints that --step or --all-steps select."""
    if arguments.all_steps:
        return "all"
    return "newest" if arguments.step is None else int(arguments.step)


def generation_mesh(overrides: Sequence[str]) -> ParallelConfig:
    """The mesh of a command that generates, independent of the training's. Raises ConfigError for other keys."""
    for override in overrides:
        if override.partition("=")[0].strip() != "parallel.tp":
            raise ConfigError(
                f"override {override!r}: generation reads only parallel.tp, the ranks that share the weights, and "
                "divides the prompts among the others; a checkpoint of any mesh is read. Remove it"
            )
    return parse(ParallelConfig, apply_overrides({"parallel": {}}, overrides)["parallel"], "command line")


def read_values(
    name: str, overrides: Sequence[str], *, keys: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Reads a config file with its base (`name` ends with .toml), or a preset as a config that has only a model, and
    applies dotted overrides.

    Args:
        keys: the keys that the command reads, `table.*` for all of a table.
        defaults: tables that a config without them gets before the overrides.

    Raises:
        ConfigError: no such file or preset, or an override of another key.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(fnmatchcase(key, known) for known in keys):
            raise ConfigError(f"override {override!r}: {key!r} is not read here; known: {', '.join(keys)}")
    values: dict[str, Any] = read_config(name) if name.endswith(".toml") else {"model": preset_table(name)}
    values = resolve({"model": {}, **(defaults or {}), **values}, overrides)
    if not isinstance(table := values["model"], dict):
        raise ConfigError(f"{name}: model = {table!r} is not a table; write it as [model] with its keys below")
    return values


def model_from(name: str, overrides: Sequence[str]) -> AnyModelConfig:
    """Reads the model of a config file or a preset, with `model.key=value` overrides.

    Raises:
        ConfigError: as `read_values`, or an invalid model.
    """
    table = read_values(name, overrides, keys=["model.*"])["model"]
    return parse_model(table, Path(name).name, own_mixers(name, table))
