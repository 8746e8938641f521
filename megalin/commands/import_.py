"""`megalin import`: a folder of another system as a run folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command
from megalin.interop.weights.importing import import_hf


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["hf"], help="hf: config.json and safetensors, as Hugging Face keeps models")
    parser.add_argument("folder", type=Path, help="the folder to read; nothing in it is run or unpickled")
    parser.add_argument("run", type=Path, help="the run folder to make")


def _run(arguments: argparse.Namespace) -> int:
    imported = import_hf(arguments.folder, arguments.run)
    print(f"{arguments.run}: {imported.layout.title}, {imported.num_parameters:,} parameters, step 0")
    if imported.without_tokenizer is not None:
        print(f"without a tokenizer: {imported.without_tokenizer}")
    return 0


COMMAND = Command("make a run folder from another system's weights", _add_arguments, _run)
