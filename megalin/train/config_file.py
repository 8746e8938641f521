"""Config files: the base that a file names, its own tables and overrides, and the model's preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalin.config import apply_overrides, read_toml, translate_renamed
from megalin.errors import ConfigError
from megalin.layers.external_mixers import external_types
from megalin.model.presets import expand_preset

CONFIG_NAME = "config.toml"
"""Name of a run's config in its folder."""
CHECKPOINTS_NAME = "checkpoints"
"""Name of the folder of a run's checkpoints."""


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads a config file. A run folder's own config.toml, which an older version may have written, may have renamed
    keys; they are translated.

    Two keys at the top of a file serve families of configs. `base`: another config file, relative to this one, whose
    tables this file's tables change key by key; a list replaces the base's. `overrides`: `dotted.key=value`, for keys
    inside lists and presets. The result keeps the overrides, those of the base first, for `resolve`.

    Raises:
        ConfigError: as `read_toml` does; a file that is its own base, or one of the keys of another type.
    """
    values = _read_with_base(Path(path), [])
    return translate_renamed(values) if _is_saved(Path(path)) else values


def _is_saved(path: Path) -> bool:
    """True for a run folder's own config.toml."""
    return path.name == CONFIG_NAME and (path.parent / CHECKPOINTS_NAME).is_dir()


def own_mixers(path: str | Path, values: Mapping[str, Any]) -> list[str]:
    """Mixers of other packages that the user's config names: the user's own words, which may be imported. A run
    folder's own config, which may be a downloaded one, is none of the user's: empty for it, and for files based on it.

    Args:
        path: the file of `values`; any other text if there is none.
        values: as `resolve` returns them, or of the table `model`.
    """
    names, file = list(external_types(values)), Path(path)
    while names and file.is_file():
        if _is_saved(file):
            return []
        file = file.parent / read_toml(file).get("base", "")
    return names


def resolve(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Expands the model's preset in the result of `read_config`, then applies the file's overrides and `overrides`, in
    this order. Overrides of `model` or `model.preset` come before the expansion, so that the others can change the
    preset's blocks, as in `model.layers.0.repeat=3`.

    Raises:
        ConfigError: as `apply_overrides` and `expand_preset` do.
    """
    values = dict(values)
    every = [*values.pop("overrides", []), *overrides]
    chosen = [each for each in every if each.partition("=")[0].strip() in ("model", "model.preset")]
    values = apply_overrides(values, chosen)
    if isinstance(values.get("model"), dict):
        values["model"] = expand_preset(values["model"])
    return apply_overrides(values, [each for each in every if each not in chosen])


def _read_with_base(path: Path, including: Sequence[Path]) -> dict[str, Any]:
    """The tables of the file over those of its base. `including`: the files that led to this one."""
    if path.resolve() in including:
        raise ConfigError(f"{path}: base: the file is its own base, by {including[-1]}; remove one of these keys")
    values = read_toml(path)
    base, overrides = values.pop("base", None), values.pop("overrides", [])
    if not isinstance(overrides, list) or not all(isinstance(each, str) for each in overrides):
        raise ConfigError(f'{path}: overrides = {overrides!r} is not a list of texts such as ["train.steps=100"]')
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base = {base!r} is not text; give the path of a config file")
        below = _read_with_base(path.parent / base, [*including, path.resolve()])
        overrides = [*below.pop("overrides", []), *overrides]
        values = _merge(below, values)
    return values | {"overrides": overrides} if overrides else values


def _merge(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `values`; tables in both are merged in the same way."""
    merged = dict(base)
    for key, value in values.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
