"""`megalin report`: an HTML report of a run, or a comparison of several."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
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
