"""`megalin import`: a run folder from another library's weights."""

from __future__ import annotations

import argparse

from megalin.interop.weights.importing import import_hf


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    imported = import_hf(arguments.folder, arguments.run)
    print(f"{arguments.run}: {imported.layout.title}, {imported.num_parameters:,} parameters, step 0")
    if imported.without_tokenizer is not None:
        print(f"without a tokenizer: {imported.without_tokenizer}")
    return 0
