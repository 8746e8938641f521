"""A published table beside our numbers, cell by cell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from megalin.reproduce import computed, runs
from megalin.reproduce.papers import Column, Published, Row, Table


class ReproducedCell(NamedTuple):
    """A published number and ours."""

    column: str
    unit: str
    published: Published
    ours: float | None
    reason: str
    """Reason why there is none of ours, or how to get one; empty if there is one."""

    @property
    def equal(self) -> bool:
        """True where ours, rounded to the digits of the published number, is that number."""
        if self.ours is None or isinstance(self.published, str):
            return False
        return abs(self.ours - self.published) <= 0.5000001 * 10.0 ** -num_digits(self.published)


class ReproducedRow(NamedTuple):
    """A row of a table beside our numbers."""

    name: str
    run: str | None
    """The folder that its numbers of quality are from."""
    cells: list[ReproducedCell]


def num_digits(published: Published) -> int:
    """Digits after the point of a published number; 0 of a text."""
    return -int(Decimal(repr(published)).as_tuple().exponent) if isinstance(published, float) else 0


def reproduce(table: Table, run_arguments: Sequence[str]) -> list[ReproducedRow]:
    """Computes or reads our number of every cell; a row with several runs appears once for each.

    Raises:
        ConfigError: as `runs.read_runs`.
    """
    given = runs.read_runs(run_arguments, table)
    rows = []
    for row in table.rows:
        own: list[runs.MatchedRun | None] = [run for run in given if runs.matches(run, row)]
        for run in own or [None]:
            rows.append(ReproducedRow(row.name, None if run is None else str(run.record.path), _cells(table, row, run)))
    return rows


def _cells(table: Table, row: Row, run: runs.MatchedRun | None) -> list[ReproducedCell]:
    ours: dict[str, float] = {}
    cells = []
    for column, published in zip(table.columns, row.published, strict=True):
        value, reason = _value(column, published, row, run, ours)
        if value is not None:
            ours[column.name] = value
        cells.append(ReproducedCell(column.name, column.unit, published, value, reason))
    return cells


def _value(
    column: Column, published: Published, row: Row, run: runs.MatchedRun | None, ours: dict[str, float]
) -> tuple[float | None, str]:
    if column.measure is None:
        return None, column.reason or ""
    is_computed = column.measure in computed.MEASURES or column.measure == computed.PLANNED
    if row.preset is None and (run is None or is_computed):
        return None, row.reason or ""
    if is_computed:
        return (None, "the paper prints none") if published == "-" else (computed.computed(column, row), "")
    if run is None:
        return None, "needs a run of this model: --runs RUN"
    if column.measure == "mean":
        parts = [ours[name] for name in column.columns if name in ours]
        complete = len(parts) == len(column.columns)
        return (statistics.fmean(parts), "") if complete else (None, f"the mean of {', '.join(column.columns)}")
    value = runs.measured(column.measure, run)
    if value is None:
        return None, f"not measured yet: {runs.command(column.measure)}"
    return value / column.scale, ""
