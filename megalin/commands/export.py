"""`megalin export`: a run's weights in another library's format."""

from __future__ import annotations

import argparse

from megalin.commands.base import steps_option
from megalin.interop.weights.exporting import check_empty, export_hf
from megalin.train.open_run import selected_steps


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    steps = selected_steps(arguments.run, steps_option(arguments))
    folders = [arguments.out / f"step-{step}" if arguments.all_steps else arguments.out for step in steps]
    for folder in folders:
        check_empty(folder)
    for step, folder in zip(steps, folders, strict=True):
        layout = export_hf(arguments.run, folder, form=arguments.format, step=step)
        print(f"{folder}: {layout.title}")
    return 0
