"""`megalin fit`: scaling laws of measured losses, and predictions from them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megalin.commands.base import Command
from megalin.errors import ConfigError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--points",
        type=Path,
        metavar="CSV",
        help="file of losses: columns parameters (without embeddings), tokens, loss (nats a token) and, if known, "
        "flops (left out: 6 N D), mixer, state_bytes, run",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--resamples", type=int, default=200, help="resamples of the bands (200)")


def _run(arguments: argparse.Namespace) -> int:
    from megalin.scaling_laws.fit import fit_points
    from megalin.scaling_laws.points import by_mixer, read_points
    from megalin.scaling_laws.text import report_lines

    if arguments.resamples < 20:
        raise ConfigError(f"--resamples {arguments.resamples}: the ends of a 90 % band need at least 20")
    if arguments.points is None:
        raise ConfigError("nothing to fit: give --points CSV")
    read = read_points(arguments.points)
    if not read.has_flops:
        print(f"{arguments.points}: no column flops; C = 6 N D", file=sys.stderr)
    fits = {name: fit_points(points, arguments.resamples) for name, points in by_mixer(read.points).items()}
    if arguments.json:
        objects = {name: fit.as_json() for name, fit in fits.items()}
        print(json.dumps({"mixers": objects} if len(objects) > 1 else next(iter(objects.values()))))
    else:
        print("\n".join(report_lines(fits)))
    return 0


COMMAND = Command("fit scaling laws to measured losses, and predict from them", _add_arguments, _run)
