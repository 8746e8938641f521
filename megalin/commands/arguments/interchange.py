"""Arguments of the commands that exchange weights with other libraries: export, import."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.arguments.choices import EXPORT_FORMATS
from megalin.commands.arguments.command import Command, Output, add_step_options


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["hf"], help="hf: Hugging Face's config.json and safetensors")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the folder to create; with --all-steps, a folder step-N in it for each")
    add_step_options(parser)
    parser.add_argument(
        "--format", choices=EXPORT_FORMATS, help="model class, where several classes can hold the model"
    )


def _import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["hf"], help="hf: Hugging Face's config.json and safetensors")
    parser.add_argument("folder", type=Path, help="the folder to read; nothing in it is executed or unpickled")
    parser.add_argument("run", type=Path, help="the run folder to create")


EXPORT = Command(
    "export",
    "export a run's weights to another library's format",
    _export,
    "export",
    """\
megalin export hf runs/mine exported
megalin export hf runs/mine exported --format fla --step 1000""",
    takes_mixers=True,
    prints_result=False,
    outputs={"out": Output.FOLDER},
)
IMPORT = Command(
    "import",
    "create a run folder from another library's weights",
    _import,
    "import_",
    "megalin import hf downloads/llama runs/llama",
    prints_result=False,
    outputs={"run": Output.FOLDER},
)
