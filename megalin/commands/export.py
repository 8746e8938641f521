"""`megalin export`: a run's weights in another library's format."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command
from megalin.interop.weights.exporting import export_hf
from megalin.interop.weights.layouts import FORMATS


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["hf"], help="hf: Hugging Face's config.json and safetensors")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the folder to create")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after N steps (the newest one)")
    parser.add_argument("--format", choices=FORMATS, help="model class, where several classes can hold the model")


def _run(arguments: argparse.Namespace) -> int:
    layout = export_hf(arguments.run, arguments.out, form=arguments.format, step=arguments.step)
    print(f"{arguments.out}: {layout.title}")
    return 0


COMMAND = Command("export a run's weights to another library's format", _add_arguments, _run)
