"""`megalin report`: an HTML report of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command
from megalin.report.page import status, write_report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a run, finished or in progress")
    parser.add_argument("--output", type=Path, help="file to write (RUN/report.html)")


def _run(arguments: argparse.Namespace) -> int:
    output = arguments.output or arguments.run / "report.html"
    print(f"{output}: {status(write_report(arguments.run, output))}")
    return 0


COMMAND = Command("write a run's report as one HTML file: curves, evaluations, incidents, config", _add_arguments, _run)
