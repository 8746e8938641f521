"""Tells whether two runs trained on the same tokens in each step, from the ledgers in their folders."""

from __future__ import annotations

import argparse
import sys

from megalin.errors import exit_code
from megalin.train.ledger import compare_ledgers


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; the exit code is 0 for equal steps, 1 for others, or that of the error that is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", help="a run folder, or its ledger.jsonl")
    parser.add_argument("second", help="likewise")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    found = compare_ledgers(args.first, args.second)
    print(
        f"{found.steps} steps in both, {found.only_first} in the first alone, {found.only_second} in the second alone"
    )
    if found.first_difference is not None:
        print(f"other samples from step {found.first_difference} on")
        return 1
    print("the same samples in each step that both have")
    return 0


if __name__ == "__main__":
    sys.exit(main())
