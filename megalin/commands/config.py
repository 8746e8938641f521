"""`megalin config`: the resolved config of a run, as TOML."""

from __future__ import annotations

import argparse

from megalin.commands.base import Command
from megalin.config import dumps
from megalin.train.config import load_run_config


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a config file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides, for example train.steps=100"
    )


def _run(arguments: argparse.Namespace) -> int:
    print(dumps(load_run_config(arguments.config, arguments.overrides)), end="")
    return 0


COMMAND = Command("print the resolved config", _add_arguments, _run)
