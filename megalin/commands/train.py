"""`megalin train`: one run, in one process or in all that a launcher started."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.checkpoint.agreement import rank
from megalin.commands.base import Command
from megalin.launch import launched
from megalin.parallel.mesh import compute_device, process_group
from megalin.train.config import check_launch, load_run_config
from megalin.train.loop import TrainResult, train


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, as train.steps=100")
    parser.add_argument("--folder", type=Path, help="run folder (runs/<name of the config file>); it is resumed")


def _run(arguments: argparse.Namespace) -> int:
    config = load_run_config(arguments.config, arguments.overrides)
    check_launch(config, launched().world_size)
    path = arguments.folder or Path("runs") / Path(arguments.config).stem
    device = compute_device()
    with process_group(device):
        result = train(config, device, path)
        if rank() == 0:
            _report(result, path, config.train.steps)
    return 0


def _report(result: TrainResult, path: Path, steps: int) -> None:
    print(f"{path}: step {result.step} of {steps}" + (" (nothing was left to do)" if result.loss is None else ""))
    if result.evaluation is not None:
        print(f"validation: {result.evaluation.summary()}")


COMMAND = Command("train a model, or go on with a run", _add_arguments, _run)
