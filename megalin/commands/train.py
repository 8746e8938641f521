"""`megalin train`: one run, in one process or on the ranks that a launcher started."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.api.trainer import Trainer
from megalin.launch import launched
from megalin.train.config import load_run_config
from megalin.train.loop import TrainResult
from megalin.train.tasks import task_lines


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    path = run_folder(arguments)
    trainer = Trainer(load_run_config(arguments.config, arguments.overrides), path)
    result = trainer.train(memory_check=not arguments.no_memory_check)
    if launched().rank == 0:
        _print_result(result, path, trainer.config.train.steps)
    return 0


def run_folder(arguments: argparse.Namespace) -> Path:
    """The run folder: --folder, or runs/NAME of a config file NAME.toml."""
    return arguments.folder or Path("runs") / Path(arguments.config).stem


def _print_result(result: TrainResult, path: Path, steps: int) -> None:
    print(f"{path}: step {result.step} of {steps}" + (" (nothing left to do)" if result.loss is None else ""))
    if result.evaluation is not None:
        print(f"validation: {result.evaluation.summary()}")
    for line in task_lines(result.tasks):
        print(line)
