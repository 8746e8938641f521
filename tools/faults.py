"""Fault matrix: injects each fault of a training run for real and prints a line about what a user sees.

python tools/faults.py F31 F47
python tools/faults.py --all

Runs are small, on the CPU; several ranks are gloo processes. PASS: every required behaviour was seen. PARTLY: the run
is safe, but a message, an exit code or a time is not as required. FAIL: the essential behaviour was not seen. The last
line counts the rows that pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from fault_matrix.matrix import RowResult, numbers, run
from fault_matrix.processes import stop_server

QUICK = (
    *("F11", "F17", "F18", "F25", "F26", "F28", "F31", "F32", "F37", "F40", "F43"),
    *("F44", "F46", "F47", "F48", "F50", "F53", "F55", "F57", "F61", "F67", "F70"),
)
"""Rows without arguments: some of each kind, those of about a CPU second. CI injects them."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if every injected row passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"rows to inject ({' '.join(QUICK)})")
    parser.add_argument("--all", action="store_true", help="inject every row")
    parser.add_argument("--repeat", type=int, default=1, help="injections of each row, of which the worst counts (1)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, one JSON object per line")
    parser.add_argument("--keep", type=Path, help="new folder for the files of the injections, which then stay")
    args = parser.parse_args(arguments)
    known = numbers()
    if unknown := [number for number in args.ids if number not in known]:
        parser.error(f"no fault {', '.join(unknown)}; known are {known[0]} to {known[-1]}")
    chosen = known if args.all else args.ids or list(QUICK)
    if args.keep is not None:
        args.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        rows = _print_rows(chosen, args.keep or Path(temporary), repeat=args.repeat)
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row._asdict()) + "\n" for row in rows))
    print(f"{sum(row.verdict == 'PASS' for row in rows)} of {len(chosen)}")
    return int(any(row.verdict != "PASS" for row in rows))


def _print_rows(chosen: list[str], folder: Path, *, repeat: int) -> list[RowResult]:
    os.chmod(folder, 0o755)  # rows without root's rights read it too
    rows = []
    try:
        for row in run(chosen, folder, repeat=repeat):
            print(row.line(), flush=True)
            rows.append(row)
    finally:
        stop_server()
    return rows


if __name__ == "__main__":
    sys.exit(main())
