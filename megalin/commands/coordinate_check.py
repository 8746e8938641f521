"""`megalin coordinate-check`: the growth of activations and of their updates with the width of a model."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from megalin.commands.base import Command, model_from
from megalin.errors import ConfigError, StorageError
from megalin.model.config import ModelConfig


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a preset, or a config file of a model or a run")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value", help="changes to the model")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256], help="widths (32 64 128 256)")
    parser.add_argument("--steps", type=int, default=4, help="steps of AdamW before the measurement (4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate at every width (1e-3)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    from megalin.scaling_laws.coordinates import coordinate_check, coordinate_figure, growths

    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: use at least 1")
    if not (math.isfinite(arguments.lr) and arguments.lr > 0):
        raise ConfigError(f"--lr {arguments.lr}: use a positive number")
    model = model_from(arguments.model, arguments.overrides)
    if not isinstance(model, ModelConfig):
        raise ConfigError(f'{arguments.model}: model.kind = "encoder", but only decoders are checked; give a decoder')
    found = coordinate_check(model, widths=arguments.widths, steps=arguments.steps, learning_rate=arguments.lr)
    slopes = growths(found)
    if arguments.json:
        finite = [
            {key: value if isinstance(value, str) or math.isfinite(value) else None for key, value in each.items()}
            for each in (slope._asdict() for slope in slopes)
        ]
        print(json.dumps({"growth": finite, "coordinates": [each._asdict() for each in found]}))
    else:
        print(f"exponents in the width, {arguments.steps} steps at lr {arguments.lr:g}; 0: constant over widths")
        print(f"{'output':32}{'size':>8}{'change':>8}")
        for slope in slopes:
            print(f"{slope.name:32}{slope.size:8.2f}{slope.change:8.2f}")
    if arguments.png:
        try:
            coordinate_figure(found).savefig(arguments.png, format="png")
        except OSError as error:
            raise StorageError(f"{arguments.png}: cannot be written ({error.strerror}); choose another --png") from None
    return 0


COMMAND = Command("measure how activations and their updates grow with a model's width", _add_arguments, _run)
