"""`megalin report`: an HTML report of a run, or a comparison of several."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command
from megalin.errors import ConfigError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run, finished or in progress")
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="RUN", help="compare these runs: losses, evaluations, states"
    )
    parser.add_argument("--output", type=Path, help="file to write (RUN/report.html; with --compare: compare.html)")


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.run is None) == (arguments.compare is None):
        raise ConfigError("give the folder of one run, or --compare with the folders of several")
    if arguments.compare is not None:
        from megalin.report.comparison import write_comparison

        print("\n".join(map(str, write_comparison(arguments.compare, arguments.output or Path("compare.html")))))
        return 0
    from megalin.report.page import status, write_report

    output = arguments.output or arguments.run / "report.html"
    print(f"{output}: {status(write_report(arguments.run, output))}")
    return 0


COMMAND = Command(
    "write a run's report as one HTML file: curves, evaluations, incidents, config; or compare runs",
    _add_arguments,
    _run,
)
