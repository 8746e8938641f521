"""`megalin doctor`: why a run ended or does not go on, and what to do next."""

from __future__ import annotations

import argparse

from megalin.report.doctor import examine, lines


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    for line in lines(*examine(arguments.run)):
        print(line)
    return 0
