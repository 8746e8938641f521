"""`megalin eval`: the held-out loss of a saved run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megalin.commands.base import Command
from megalin.data.config import SPLITS
from megalin.evaluation import evaluate_run
from megalin.parallel.mesh import Mesh, ParallelConfig, compute_device, process_group


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as data.validation=['prefix']")
    parser.add_argument("--split", choices=SPLITS, default="validation", help="which split to read (validation)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    device = compute_device()
    with process_group(device):
        mesh = Mesh(ParallelConfig(), device)
        evaluation = evaluate_run(arguments.folder, mesh, arguments.overrides, split=arguments.split)
        if not mesh.is_first_rank:
            return 0
    if arguments.json:
        print(json.dumps(evaluation._asdict()))
        return 0
    print("\n".join(evaluation.lines()))
    return 0


COMMAND = Command("held-out loss of a run, and what goes with its kind of model", _add_arguments, _run)
