"""`megalin train`: one run, in one process or on the ranks that a launcher started."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.evaluation.in_loop import LoopTaskRunner
from megalin.launch import launched
from megalin.parallel.agreement import rank
from megalin.parallel.mesh import check_device
from megalin.parallel.process_group import compute_device, process_group
from megalin.planner.check import check_memory
from megalin.train.config import check_launch, load_run_config
from megalin.train.hardware import device_memory_bytes
from megalin.train.loop import TrainResult, train
from megalin.train.tasks import task_lines


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    config = load_run_config(arguments.config, arguments.overrides)
    world_size, device = launched().world_size, compute_device()
    check_launch(config, world_size)
    check_device(config.parallel, device.type)
    if not arguments.no_memory_check:
        check_memory(config, world_size, device_memory_bytes(device))
    path = arguments.folder or Path("runs") / Path(arguments.config).stem
    with process_group(device):
        tasks = LoopTaskRunner() if config.evaluation.tasks else None
        result = train(config, device, path, tasks=tasks)
        if rank() == 0:
            _print_result(result, path, config.train.steps)
    return 0


def _print_result(result: TrainResult, path: Path, steps: int) -> None:
    print(f"{path}: step {result.step} of {steps}" + (" (nothing left to do)" if result.loss is None else ""))
    if result.evaluation is not None:
        print(f"validation: {result.evaluation.summary()}")
    for line in task_lines(result.tasks):
        print(line)
