"""`megalin eval`: the held-out loss of a saved run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megalin.commands.base import Command
from megalin.data.config import SPLITS
from megalin.evaluation.held_out import evaluate_on_launched_ranks


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example parallel.cp=2 or data.validation=['a']"
    )
    parser.add_argument("--split", choices=SPLITS, default="validation", help="data split to evaluate on (validation)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    evaluation = evaluate_on_launched_ranks(arguments.folder, arguments.overrides, split=arguments.split)
    if evaluation is None:  # not rank 0
        return 0
    print(json.dumps(evaluation._asdict()) if arguments.json else "\n".join(evaluation.report_lines()))
    return 0


COMMAND = Command("evaluate a run on held-out data: loss, and the metrics of its kind of model", _add_arguments, _run)
