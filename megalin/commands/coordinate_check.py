"""`megalin coordinate-check`: the growth of activations and of their updates with the width of a model."""

from __future__ import annotations

import argparse
import json
import math

from megalin.commands.base import model_from
from megalin.errors import ConfigError, StorageError
from megalin.model.config import ModelConfig


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
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
