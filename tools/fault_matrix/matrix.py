"""Running of rows of the matrix: a folder for each injection, its verdict and its line."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from fault_matrix import (  # noqa: F401
    checkpoint_rows,
    config_rows,
    corpus_rows,
    hang_rows,
    hostile_rows,
    launch_rows,
    process_rows,
    shard_rows,
    storage_rows,
)
from fault_matrix.lab import Check, Lab
from fault_matrix.table import FAULTS

Verdict = Literal["PASS", "PARTLY", "FAIL"]


class RowResult(NamedTuple):
    """Result of a row."""

    number: str
    name: str
    verdict: Verdict
    seen: str
    """Checks that do not hold."""
    seconds: float

    def line(self) -> str:
        """The row as text."""
        line = f"{self.number}  {self.verdict:6} {self.seconds:6.1f} s  {self.name}"
        return f"{line}: {self.seen}" if self.seen else line


def verdict(checks: Sequence[Check]) -> Verdict:
    """PASS if every check holds, FAIL if the first, the essential one, does not, else PARTLY."""
    if not checks or not checks[0].holds:
        return "FAIL"
    return "PASS" if all(check.holds for check in checks) else "PARTLY"


def numbers() -> list[str]:
    """Ids of all rows, in order."""
    return sorted(FAULTS)


def run(chosen: Sequence[str], folder: Path, *, repeat: int = 1) -> Iterator[RowResult]:
    """Yields the result of each chosen row: the worst of its repetitions."""
    order = ("FAIL", "PARTLY", "PASS")
    for number in chosen:
        found = [_inject(number, folder / f"{number}-{attempt}", folder) for attempt in range(repeat)]
        yield min(found, key=lambda row: order.index(row.verdict))


def _inject(number: str, folder: Path, template: Path) -> RowResult:
    started = time.monotonic()
    lab = Lab(folder, template)
    FAULTS[number].inject(lab)
    failed = [f"{check.name} ({check.seen})" if check.seen else check.name for check in lab.checks if not check.holds]
    seen = "; ".join(" ".join(each.split()) for each in failed)
    return RowResult(number, FAULTS[number].name, verdict(lab.checks), seen[:400], time.monotonic() - started)
