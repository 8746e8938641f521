"""Compares the ledgers of two runs: the steps at which they trained on the same samples."""

from __future__ import annotations

import argparse
import sys

from megalin.terminal_output import exit_code
from megalin.train.ledger import compare_ledgers


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 for equal steps, 1 for different ones, or the exit code of the printed error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", help="a run folder, or its ledger.jsonl")
    parser.add_argument("second", help="another run folder or ledger.jsonl")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    found = compare_ledgers(args.first, args.second)
    print(f"{found.steps} steps in both, {found.only_first} only in the first, {found.only_second} only in the second")
    if found.first_difference is not None:
        print(f"different samples from step {found.first_difference} on")
        return 1
    print("the same samples in every step of both")
    return 0


if __name__ == "__main__":
    sys.exit(main())
