"""`megalin config`: the resolved config of a run, as TOML."""

from __future__ import annotations

import argparse

from megalin.config import dumps
from megalin.train.config import load_run_config


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    print(dumps(load_run_config(arguments.config, arguments.overrides)), end="")
    return 0
