"""`megalin params`: parameters, operations and state of a model, counted on the meta device."""

from __future__ import annotations

import argparse
import json

from megalin.commands.base import Command, model_from
from megalin.errors import ConfigError
from megalin.model.build import make_model
from megalin.model.counts import count
from megalin.model.presets import load_preset, preset_names


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a preset or a config file; without it the presets are listed")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value", help="changes to the model")
    parser.add_argument(
        "--length", type=int, default=8192, help="tokens per sequence, for the number of operations (8192)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        print("\n".join(preset_names()))
        return 0
    if arguments.length < 1:
        raise ConfigError(f"--length {arguments.length}: a sequence has at least 1 token")
    counted = count(make_model(model_from(arguments.model, arguments.overrides)), arguments.length)
    counts = {name: value for name, value in counted._asdict().items() if value is not None}
    counts["length"] = arguments.length
    if arguments.json:
        print(json.dumps({"model": arguments.model, **counts}))
        return 0
    units = {
        "flops_per_token": "forward and backward, at this length",
        "forward_flops_per_token": "forward only",
        "state_bytes": "per sequence in decoding, fp32",
        "length": "tokens per sequence",
    }
    for name, value in counts.items():
        print(f"{name:26}{value:>26,}  {units.get(name, '')}".rstrip())
    if arguments.model in preset_names():
        print(load_preset(arguments.model).note)
    return 0


COMMAND = Command("count a model's parameters, operations and state", _add_arguments, _run)
