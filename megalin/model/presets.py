"""Presets: named models, the tables of megalin/presets/*.toml, one file a family."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from megalin.config import suggest
from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, parse_model


class Preset(NamedTuple):
    """A named model, with a note on its source."""

    name: str
    model: AnyModelConfig
    note: str


def preset_names() -> list[str]:
    """The names of all presets, family by family."""
    return list(_tables())


def preset_table(name: str) -> dict[str, Any]:
    """The `model` table of a preset as TOML gives it. Raises ConfigError for a name that does not exist."""
    tables = _tables()
    if name not in tables:
        raise ConfigError(f"preset {name!r}: there is no such preset; {suggest(name, list(tables))}")
    table: dict[str, Any] = copy.deepcopy(tables[name]["model"])
    return table


def load_preset(name: str) -> Preset:
    """The preset `name`. Raises ConfigError for a name that does not exist."""
    table = preset_table(name)
    return Preset(name, parse_model(table, f"preset {name}"), str(_tables()[name]["note"]))


def preset_families() -> dict[str, list[str]]:
    """The names of the presets by family, a file of megalin/presets."""
    return {family: list(tables) for family, tables in _families().items()}


def _tables() -> dict[str, Any]:
    return {name: table for tables in _families().values() for name, table in tables.items()}


@cache
def _families() -> dict[str, dict[str, Any]]:
    """All presets by family and name. Callers copy what they change: `apply_overrides` and pydantic do."""
    folder = resources.files("megalin") / "presets"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8")) for file in files}


def expand_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """A model table whose key `preset` names a preset: that preset's table, overridden by the other keys.

    Raises:
        ConfigError: for a preset that does not exist.
    """
    values = dict(table)
    name = values.pop("preset", None)
    return values if name is None else {**preset_table(str(name)), **values}
