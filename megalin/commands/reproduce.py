"""`megalin reproduce`: a paper's table beside our numbers."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megalin.reproduce.papers import Published, Table, load_paper, load_table, paper_names
from megalin.reproduce.tables import ReproducedCell, ReproducedRow, num_digits, reproduce

_MAX_NAMED = 3
"""Rows that are named for a reason; the others are counted."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    if arguments.table is None:
        papers = paper_names() if arguments.paper is None else [arguments.paper]
        titles = {name: {key: table.title for key, table in load_paper(name).tables.items()} for name in papers}
        print(json.dumps(titles) if arguments.json else "\n".join(_listing(titles)))
        return 0
    table = load_table(arguments.paper, arguments.table)
    rows = reproduce(table, arguments.runs)
    if arguments.json:
        print(json.dumps({"paper": arguments.paper, "table": arguments.table, **_json(table, rows)}))
    else:
        print(f"{load_paper(arguments.paper).title}, table {arguments.table}: {table.title}\n")
        print("\n".join(_lines(table, rows)))
    return 0


def _listing(titles: dict[str, dict[str, str]]) -> Iterator[str]:
    for name, tables in titles.items():
        yield f"{name}: {load_paper(name).title}"
        yield from (f"  {key:10} {title}" for key, title in tables.items())


def _json(table: Table, rows: Sequence[ReproducedRow]) -> dict[str, object]:
    cells = [
        {"row": row.name, "run": row.run, **cell._asdict(), "equal": cell.equal} for row in rows for cell in row.cells
    ]
    return {"title": table.title, "notes": table.notes, "cells": cells}


def _lines(table: Table, rows: Sequence[ReproducedRow]) -> Iterator[str]:
    """The table, each cell the published number and ours; then units, notes and reasons."""
    grid = [["", *(column.name for column in table.columns)]]
    columns = zip(*(row.published for row in table.rows), strict=True)
    digits = [max(num_digits(number) for number in column) for column in columns]
    for row in rows:
        name = row.name if row.run is None else f"{row.name} ({row.run})"
        grid.append([name, *map(_text, row.cells, digits)])
    widths = [max(len(line[i]) for line in grid) for i in range(len(grid[0]))]
    for line in grid:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
    cells = [cell for row in rows for cell in row.cells]
    ours = [cell for cell in cells if cell.ours is not None]
    yield ""
    yield "published / ours; = where ours has the printed digits. " + "; ".join(
        f"{column.name}: {column.unit}" for column in table.columns
    )
    numbers = [cell for cell in cells if not isinstance(cell.published, str)]
    yield f"{len(numbers)} published numbers, {len(ours)} of ours, {sum(cell.equal for cell in ours)} equal."
    yield from table.notes
    yield from _reasons(rows)


def _text(cell: ReproducedCell, digits: int) -> str:
    """A cell; `digits`: the most after the point in its column, so that a last zero that TOML loses is printed."""
    published = cell.published
    text = f"{published:,}" if isinstance(published, int) else str(published)
    if isinstance(published, float):
        text = f"{published:,.{min(digits, num_digits(published) + 1)}f}"
    return text if cell.ours is None else f"{text} {'=' if cell.equal else '/'} {_ours(published, cell.ours)}"


def _ours(published: Published, ours: float) -> str:
    """Our number: with a digit more than the published one, or whole where both or large ones are."""
    if isinstance(published, float):
        return f"{ours:,.{num_digits(published) + 1}f}"
    if isinstance(published, int) and (published >= 1000 or float(ours).is_integer()):
        return f"{round(ours):,}"
    return f"{ours:.5g}"


def _reasons(rows: Sequence[ReproducedRow]) -> Iterator[str]:
    """A line a reason, with the cells that it explains."""
    places: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for cell in row.cells:
            if cell.reason and row.name not in places[cell.reason]:
                places[cell.reason].append(row.name)
    for reason, names in places.items():
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        yield f"without ours ({', '.join(names[:_MAX_NAMED])}{more}): {reason}"
