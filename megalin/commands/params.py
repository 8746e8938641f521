"""`megalin params`: parameters, operations and state of a model, counted on the meta device; or of all presets."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from megalin.commands.base import read_values
from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, parse_model
from megalin.model.presets import load_preset, preset_families, preset_names
from megalin.terminal_output import terminal
from megalin.train.config_file import own_mixers

if TYPE_CHECKING:
    from megalin.model.counts import Counts

DEFAULT_LENGTH = 8192
"""Tokens per sequence of a preset."""
_TABLE_WIDTH = 160  # where the output is not a terminal
_NOTES = {
    "flops_per_token": "forward and backward, at this length",
    "forward_flops_per_token": "forward only",
    "state_bytes": "per sequence in decoding, fp32",
    "length": "tokens per sequence",
}


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    length = arguments.length
    if length is not None and length < 1:
        raise ConfigError(f"--length {length}: a sequence has at least 1 token")
    if arguments.model is None:
        _print_presets(length or DEFAULT_LENGTH, as_json=arguments.json)
        return 0
    values = read_values(arguments.model, arguments.overrides, keys=["model.*"])
    length = length or _length_of(values) or DEFAULT_LENGTH
    counted = _count(parse_model(values["model"], arguments.model, own_mixers(arguments.model, values)), length)
    if arguments.json:
        print(json.dumps(_object(arguments.model, counted, length)))
        return 0
    for name, value in (_present(counted) | {"length": length}).items():
        short = "" if name == "length" else _short(value, name)
        print(f"{name:26}{value:>26,}  {short:>10}  {_NOTES.get(name, '')}".rstrip())
    if arguments.model in preset_names():
        print(load_preset(arguments.model).note)
    return 0


def _count(model: AnyModelConfig, length: int) -> Counts:
    from megalin.model.counts import count_config  # imports torch, which an error above needs not wait for

    return count_config(model, length)


def _length_of(values: dict[str, Any]) -> int | None:
    """The length of the config's samples, if it says one."""
    data = values.get("data")
    length = data.get("sequence_length") if isinstance(data, dict) else None
    return length if isinstance(length, int) and length > 0 else None


def _present(counted: Counts) -> dict[str, int]:
    """The counts that the model has."""
    return {name: value for name, value in counted._asdict().items() if value is not None}


def _object(name: str, counted: Counts, length: int) -> dict[str, Any]:
    return {"model": name, **_present(counted), "length": length}


def _print_presets(length: int, *, as_json: bool) -> None:
    """Prints all presets, family by family, counted as one model is."""
    found = [
        (family, preset, _count(preset.model, length))
        for family, names in preset_families().items()
        for preset in map(load_preset, names)
    ]
    if as_json:
        objects = [
            {"family": family, **_object(preset.name, counted, length), "source": preset.note}
            for family, preset, counted in found
        ]
        print(json.dumps(objects))
        return
    table = Table(
        Column("family", no_wrap=True),
        Column("preset", no_wrap=True),
        Column("parameters", justify="right", no_wrap=True),
        Column("state", justify="right", no_wrap=True),
        "source",
    )
    shown = ""
    for family, preset, counted in found:
        if family != shown and shown:
            table.add_section()
        state = "none" if counted.state_bytes is None else _short(counted.state_bytes, "state_bytes")
        source = re.split(r"\.(?=\s+[A-Z])", preset.note)[0].removesuffix(".").replace("[", r"\[")
        first = family if family != shown else ""
        table.add_row(first, preset.name, _short(counted.parameters, "parameters"), state, source)
        shown = family
    Console(file=terminal(), width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(table)
    print("state: bytes of a sequence's state in decoding, fp32, before its first token (caches of softmax attention")
    print("grow from 0; an encoder has none). megalin params PRESET counts a model in full.")


def _short(value: int, name: str) -> str:
    """A count in three significant digits: bytes with binary units, others with decimal ones (B: billions)."""
    base, units = (1024, ("B", "KiB", "MiB", "GiB")) if name.endswith("bytes") else (1000, ("", "K", "M", "B", "T"))
    if "flops" in name:
        units = ("", "K", "M", "G", "T")
    scaled, number = float(value), 0
    while scaled >= 999.5 and number < len(units) - 1:
        scaled, number = scaled / base, number + 1
    digits = 0 if number == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f} {units[number]}".rstrip()
