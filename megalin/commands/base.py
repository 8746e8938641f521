"""The type of a command, and the model that its arguments name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalin.config import apply_overrides
from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, parse_model
from megalin.model.presets import expand_preset, preset_table
from megalin.train.run_folder import read_config


class Command(NamedTuple):
    """A command: its help, its arguments, and a function that runs it and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def model_from(name: str, overrides: Sequence[str]) -> AnyModelConfig:
    """Reads the model of a config file (`name` ends with .toml) or of a preset, with `model.key=value` overrides.

    Raises:
        ConfigError: no such file or preset, an invalid model, or an override of a key outside the model.
    """
    for override in overrides:
        if not override.startswith("model."):
            raise ConfigError(
                f"override {override!r}: only the model can be overridden here; write model.<key>=<value>"
            )
    values: dict[str, Any] = read_config(name) if name.endswith(".toml") else {"model": preset_table(name)}
    values = apply_overrides(values, overrides)
    table = values.get("model", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: model = {table!r} is not a table; write it as [model] with its keys below")
    return parse_model(expand_preset(table), Path(name).name)
