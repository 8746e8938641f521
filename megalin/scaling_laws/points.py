"""Measured losses by mixer: parameters, tokens, nats a token, FLOPs and state bytes, and their CSV file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megalin.config import suggest
from megalin.errors import DataError
from megalin.files import read_input
from megalin.scaling_laws.surface import Losses

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUMBERS = ("parameters", "tokens", "loss")
"""Columns that a file of points must have."""
OPTIONAL = ("flops", "mixer", "state_bytes", "run")
_LIMIT_BYTES = 1 << 26


class Point(NamedTuple):
    """A measured loss."""

    parameters: float
    """N, without embeddings."""
    tokens: float
    """D, training tokens before the measurement."""
    loss: float
    """Held-out loss in nats a token."""
    flops: float
    """C, forward and backward operations before the measurement."""
    mixer: str = ""
    state_bytes: float | None = None
    """Bytes of one sequence's decoding state; None where unknown, or where it grows with the sequence."""
    run: str = ""
    """Name of the run or of the trunk that its branches share: their losses have common deviations. Empty: its own."""


class Points(NamedTuple):
    """The measured losses of one mixer."""

    losses: Losses
    flops: NDArray[np.float64]
    state_bytes: NDArray[np.float64]
    """NaN where unknown."""
    groups: NDArray[np.intp]
    """Number of the run of each loss."""

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Points:
        """The points at an index or where a mask is true."""
        return Points(self.losses.take(index), self.flops[index], self.state_bytes[index], self.groups[index])


def by_mixer(points: Sequence[Point]) -> dict[str, Points]:
    """Points of each mixer, in the order of their first appearance."""
    result = {}
    for mixer in dict.fromkeys(point.mixer for point in points):
        own = [point for point in points if point.mixer == mixer]
        columns = (np.array([getattr(point, name) for point in own], np.float64) for name in NUMBERS)
        names = [point.run or f"\0{number}" for number, point in enumerate(own)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        result[mixer] = Points(
            Losses(*columns),
            np.array([point.flops for point in own], np.float64),
            np.array([math.nan if point.state_bytes is None else point.state_bytes for point in own], np.float64),
            np.array([numbers[name] for name in names], np.intp),
        )
    return result


class PointsFile(NamedTuple):
    """Content of a file of points."""

    points: list[Point]
    has_flops: bool
    """False where FLOPs are 6 N D."""


def read_points(path: str | Path) -> PointsFile:
    """Reads a CSV file with the columns parameters, tokens, loss and, if given, flops, mixer, state_bytes and run.

    Without the column flops, C = 6 N D.

    Raises:
        DataError: it cannot be read, a column is missing or unknown, or a number is not finite and positive.
    """
    remedy = "give a CSV file with the columns parameters, tokens, loss"
    data = read_input(Path(path), limit_bytes=_LIMIT_BYTES, remedy=remedy)
    try:
        rows = csv.reader(io.StringIO(data.decode("utf-8-sig")), strict=True)
        head = [name.strip() for name in next(rows, [])]
        _check_head(path, head)
        points = [
            _point(f"{path}, line {rows.line_num}", head, row) for row in rows if any(cell.strip() for cell in row)
        ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error}); {remedy}") from None
    if not points:
        raise DataError(f"{path}: no points; {remedy}, and a line for each loss")
    return PointsFile(points, "flops" in head)


def _check_head(path: str | Path, head: Sequence[str]) -> None:
    if missing := [name for name in NUMBERS if name not in head]:
        raise DataError(
            f"{path}: its first line lacks the column {', '.join(missing)}; it needs {', '.join(NUMBERS)}, and may "
            f"have {', '.join(OPTIONAL)}"
        )
    known = [*NUMBERS, *OPTIONAL]
    for name in head:
        if name not in known:
            raise DataError(f"{path}: column {name!r} is unknown; {suggest(name, known)}")
        if head.count(name) > 1:
            raise DataError(f"{path}: column {name!r} stands twice; remove one of them")


def _point(place: str, head: Sequence[str], row: Sequence[str]) -> Point:
    if len(row) != len(head):
        raise DataError(f"{place}: {len(row)} cells, but {len(head)} columns; give each column a cell")
    cells = {name: cell.strip() for name, cell in zip(head, row, strict=True)}
    parameters, tokens, loss = (_number(place, name, cells) for name in NUMBERS)
    flops = _number(place, "flops", cells) if "flops" in cells else 6.0 * parameters * tokens
    state = _number(place, "state_bytes", cells) if cells.get("state_bytes") else None
    return Point(parameters, tokens, loss, flops, cells.get("mixer", ""), state, cells.get("run", ""))


def _number(place: str, name: str, cells: Mapping[str, str]) -> float:
    try:
        value = float(cells[name])
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{place}: {name} = {cells[name] or 'nothing'} is not a finite positive number; correct it")
    return value
