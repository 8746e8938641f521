"""Soak test: one long run whose memory, descriptors, threads and temporary files must not grow.

python tools/soak.py --steps 20000

The run is a real `megalin train` on the CPU. Its process is measured every second, from a quarter of the steps on.
Fails if the resident memory grows by more than --growth percent from the second quarter's mean to the last quarter's,
if descriptors or threads increase, or if a temporary file stays in the run folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fault_matrix.lab import Lab
from fault_matrix.processes import Change, stop_server, unchanged

_POLL_SECONDS = 1.0
_FEWEST = 4
"""Measurements that a comparison needs in each half."""


class Measurement(NamedTuple):
    """A process at a moment."""

    step: int
    resident_bytes: int
    descriptors: int
    threads: int


def measure(pid: int, step: int) -> Measurement:
    """Reads /proc. Raises OSError when the process has ended."""
    root = Path(f"/proc/{pid}")
    pages = int((root / "statm").read_text().split()[1])
    return Measurement(step, pages * 4096, len(list((root / "fd").iterdir())), len(list((root / "task").iterdir())))


def growth(measured: Sequence[Measurement], total_steps: int) -> tuple[float, int, int]:
    """Relative growth of memory, and absolute ones of descriptors and threads, from the second quarter to the last.

    Raises:
        ValueError: too few measurements for a comparison.
    """
    early = [each for each in measured if total_steps / 4 <= each.step < total_steps / 2]
    late = [each for each in measured if each.step >= total_steps * 3 / 4]
    if min(len(early), len(late)) < _FEWEST:
        raise ValueError(f"{len(early)} and {len(late)} measurements are too few; use more --steps")
    memory = statistics.mean(each.resident_bytes for each in late) / statistics.mean(
        each.resident_bytes for each in early
    )
    descriptors = max(each.descriptors for each in late) - max(each.descriptors for each in early)
    return memory - 1.0, descriptors, max(each.threads for each in late) - max(each.threads for each in early)


def soak(folder: Path, *, steps: int, change: Change = unchanged) -> tuple[float, int, int, int]:
    """Trains `steps` steps; returns the growths and the number of temporary files that stay."""
    lab, measured = Lab(folder / "lab", folder), list[Measurement]()
    config = lab.config(train={"steps": steps}, checkpoint={"every_steps": max(1, steps // 20), "keep_latest": 2})
    run = lab.folder / "run"
    running = lab.start("train", config, "--folder", run, change=change)
    ledger = run / "ledger.jsonl"
    while running.is_alive:
        try:
            step = ledger.read_bytes().count(b"\n") if ledger.exists() else 0
            measured.append(measure(running.pid, step))
        except OSError:
            break
        time.sleep(min(_POLL_SECONDS, steps / 2000))
    outcome = running.wait(seconds=60)
    if outcome.code != 0:
        raise RuntimeError(f"the run ended with {outcome.code}: {outcome.last_line}")
    left = [path for path in run.rglob("*") if ".tmp" in path.name]
    return *growth(measured, steps), len(left)


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if nothing grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the run (2000)")
    parser.add_argument("--growth", type=float, default=1.0, help="largest growth of the memory, percent (1)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            memory, descriptors, threads, left = soak(Path(folder), steps=args.steps)
        finally:
            stop_server()
    figures = {"descriptors": descriptors, "threads": threads, "temporary_files": left}
    print(json.dumps({"steps": args.steps, "memory_growth_percent": round(100 * memory, 2), **figures}))
    return int(100 * memory > args.growth or descriptors > 0 or threads > 0 or left > 0)


if __name__ == "__main__":
    sys.exit(main())
