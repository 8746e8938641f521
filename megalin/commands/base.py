"""The type of a command, and the config that its arguments name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from megalin.config import apply_overrides, parse
from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, parse_model
from megalin.model.presets import preset_table
from megalin.parallel.mesh import ParallelConfig
from megalin.train.config_file import read_config, resolve
from megalin.train.open_run import Steps


class Command(NamedTuple):
    """A command: its help, its arguments, and a function that runs it and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Adds --step N and --all-steps, of which `steps_option` returns the choice."""
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--step", type=int, metavar="N", help="the checkpoint after N steps (the newest one)")
    steps.add_argument("--all-steps", action="store_true", help="every checkpoint")


def steps_option(arguments: argparse.Namespace) -> Steps:
    """The checkpoints that the options of `add_step_options` select."""
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
    return parse_model(read_values(name, overrides, keys=["model.*"])["model"], Path(name).name)
