"""`megalin export`: a run's weights in another library's format."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command, add_step_options, steps_option
from megalin.interop.weights.exporting import check_empty, export_hf
from megalin.interop.weights.layouts import FORMATS
from megalin.train.open_run import selected_steps


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["hf"], help="hf: Hugging Face's config.json and safetensors")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the folder to create; with --all-steps, a folder step-N in it for each")
    add_step_options(parser)
    parser.add_argument("--format", choices=FORMATS, help="model class, where several classes can hold the model")


def _run(arguments: argparse.Namespace) -> int:
    steps = selected_steps(arguments.run, steps_option(arguments))
    folders = [arguments.out / f"step-{step}" if arguments.all_steps else arguments.out for step in steps]
    for folder in folders:
        check_empty(folder)
    for step, folder in zip(steps, folders, strict=True):
        layout = export_hf(arguments.run, folder, form=arguments.format, step=step)
        print(f"{folder}: {layout.title}")
    return 0


COMMAND = Command("export a run's weights to another library's format", _add_arguments, _run)
