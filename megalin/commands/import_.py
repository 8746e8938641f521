"""`megalin import`: a run folder from another library's weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command
from megalin.interop.weights.importing import import_hf


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=["hf"], help="hf: Hugging Face's config.json and safetensors")
    parser.add_argument("folder", type=Path, help="the folder to read; nothing in it is executed or unpickled")
    parser.add_argument("run", type=Path, help="the run folder to create")


def _run(arguments: argparse.Namespace) -> int:
    imported = import_hf(arguments.folder, arguments.run)
    print(f"{arguments.run}: {imported.layout.title}, {imported.num_parameters:,} parameters, step 0")
    if imported.without_tokenizer is not None:
        print(f"without a tokenizer: {imported.without_tokenizer}")
    return 0


COMMAND = Command("create a run folder from another library's weights", _add_arguments, _run)
