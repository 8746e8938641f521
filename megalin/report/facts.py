"""Facts of a run for people, from its config and environment: model, devices, mesh, command, commit, decoding state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megalin.config import translate_renamed
from megalin.errors import ConfigError
from megalin.generation.decoder import grows
from megalin.layers.external_mixers import external_module, external_types
from megalin.model.build import make_model
from megalin.model.config import AnyModelConfig, parse_model
from megalin.model.counts import count
from megalin.model.language_model import LanguageModel
from megalin.report.reading import RunRecord
from megalin.train.start_lines import describe_model

FACTS = ("model", "device", "mesh", "command", "commit")
"""Names of the facts, in their order."""


def run_facts(run: RunRecord) -> dict[str, str]:
    """The facts by name, without those that the folder does not hold: older runs lack command and commit."""
    facts = {
        "model": _model(run),
        "device": _device(run),
        "mesh": _mesh(run),
        "command": _command(run),
        "commit": _text(run.environment.get("commit")),
    }
    return {name: text for name, text in facts.items() if text}


def state_text(config: dict[str, Any]) -> str:
    """Size of the decoding state of a config's model; empty where the config has none, or is unreadable."""
    config_of_model = _read_model(config)
    if config_of_model is None:
        return ""
    model = make_model(config_of_model)
    if not isinstance(model, LanguageModel):
        return "none: an encoder"
    size = model.state_bytes()
    text = f"{size:,} bytes" if size or not grows(model) else ""
    cache = "a cache that grows with the sequence" if grows(model) else ""
    return " and ".join(filter(None, (text, cache)))


def flat(values: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values of a config by their dotted keys, as texts; of lists too, with indices as in overrides."""
    items: Any = ()
    if isinstance(values, dict):
        items = values.items()
    elif isinstance(values, list) and any(isinstance(value, dict | list) for value in values):
        items = enumerate(values)
    else:
        yield name, values if isinstance(values, str) else json.dumps(values, default=str)
    for key, value in items:
        yield from flat(value, f"{name}.{key}" if name else str(key))


def _read_model(config: dict[str, Any]) -> AnyModelConfig | None:
    """The model of a config; None where this version cannot read it. Raises ConfigError as `external_module` does."""
    table = config.get("model")
    if not isinstance(table, dict):
        return None
    for name in external_types(table):
        external_module(name)
    try:
        return parse_model(translate_renamed({"model": table})["model"], "config.toml")
    except ConfigError:
        return None


def _model(run: RunRecord) -> str:
    config = _read_model(run.config)
    if config is None:
        return ""
    return describe_model(config, count(make_model(config), int(run.number("data", "sequence_length") or 1)))


def _device(run: RunRecord) -> str:
    ranks, device = run.environment.get("ranks"), run.environment.get("device")
    train = run.config.get("train")
    settings = train if isinstance(train, dict) else {}
    blocks = {True: "compiled blocks", False: "eager blocks"}
    parts = (
        f"{ranks} x {device}" if isinstance(ranks, int) and isinstance(device, str) else "",
        _text(settings.get("dtype")),
        blocks[settings["compile"]] if isinstance(settings.get("compile"), bool) else "",
    )
    return ", ".join(filter(None, parts))


def _mesh(run: RunRecord) -> str:
    axes = run.environment.get("mesh")
    sizes = axes.items() if isinstance(axes, dict) else ()
    return ", ".join(f"{axis} {size}" for axis, size in sizes if size is not None)


def _command(run: RunRecord) -> str:
    command, folder = _text(run.environment.get("command")), _text(run.environment.get("working_directory"))
    return f"{command} (in {folder})" if command and folder else command


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
