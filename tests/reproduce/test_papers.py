"""Published tables: complete, with presets and measures that exist, and the numbers that the papers print."""

from __future__ import annotations

import pydantic
import pytest

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.reproduce import computed, runs
from megalin.reproduce.papers import Column, Table, load_paper, load_table, paper_names
from megalin.reproduce.tables import num_digits, reproduce

TABLES = [(paper, key) for paper in paper_names() for key in load_paper(paper).tables]
SUITES = {"loss", "choices", "recall", "needle", "lm-eval"}

# Read by hand in the papers: paper, table, row, column, number, and ours to the printed digits (None: there is none).
PRINTED = [
    ("scaling-laws", "1", "TNL", "parameters / (l d^2)", "12 + 2/h", 12.125),
    ("scaling-laws", "2", "3B", "layers", 35, 35.0),
    ("scaling-laws", "2", "1B", "heads", 16, 12.0),
    ("scaling-laws", "3", "HGRN2", "L: exponent", -0.0753, None),
    ("scaling-laws", "3", "LLaMA", "N_opt: factor", "1.82e8", None),
    ("scaling-laws", "4", "TNL 7B", "HS", 66.29, None),
    ("scaling-laws", "4", "HGRN2 0.07B", "LAMBADA", 270.1, None),
    ("scaling-laws", "5", "cos2 3072 x 8", "NIAH", 6.5, None),
    ("scaling-laws", "6", "TNL 2K", "WIKI", 26.4, None),
    ("scaling-laws", "7", "LLaMA-7B", "parameters", 6476.5, 6476.5),
    ("scaling-laws", "7", "TNL-1B", "FLOPs", 22.3, 22.3),
    ("scaling-laws", "7", "HGRN2-70M", "FLOPs", 0.5, 0.5),
    ("scaling-laws", "7", "cos2-3B", "parameters", 2799.0, 2799.3),
    ("scaling-laws", "8", "Mamba2 1B", "CSR", 51.52, None),
]


@pytest.mark.parametrize(("paper", "key"), TABLES)
def test_every_measure_exists_and_every_count_is_made(paper: str, key: str):
    table = load_table(paper, key)
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    assert len({row.name for row in table.rows}) == len(table.rows)
    for column in table.columns:
        assert set(column.columns) <= set(names)
        known = {*computed.MEASURES, *runs.MEASURES, "mean", None}
        assert column.measure in known or column.measure.split(" ")[0] in SUITES, column
    if computed.PLANNED not in {column.measure for column in table.columns}:  # seconds each: test_planned_memory
        cells = [cell for row in reproduce(table, []) for cell in row.cells]
        assert all((cell.ours is None) is bool(cell.reason) for cell in cells)
        assert all(cell.ours is None or cell.ours > 0 for cell in cells)


@pytest.mark.parametrize(("paper", "key", "name", "column", "printed", "ours"), PRINTED)
def test_printed_numbers_and_ours(paper: str, key: str, name: str, column: str, printed: object, ours: float | None):
    table = load_table(paper, key)
    row = next(row for row in table.rows if row.name == name)
    only = table.model_copy(update={"rows": [row]})
    cell = next(cell for cell in reproduce(only, [])[0].cells if cell.column == column)
    assert cell.published == printed
    if ours is None:
        assert cell.ours is None
    else:
        assert cell.ours == pytest.approx(ours, abs=0.5 * 10.0 ** -num_digits(ours) if num_digits(ours) else 0)
        assert cell.equal is (printed == ours)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("scalinglaws", "7"), "paper 'scalinglaws': there is no such paper here; did you mean 'scaling-laws'"),
        (("scaling-laws", "17"), "paper 'scaling-laws' has no table '17' here; did you mean '7'"),
        (("scaling-laws", "x"), "has no table 'x' here; known: 1, 2"),
    ],
)
def test_unknown_names_are_refused(names: tuple[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_table(*names)


def test_incomplete_tables_are_refused():
    with pytest.raises(pydantic.ValidationError, match="give either measure or reason"):
        Column(name="a", unit="b")
    columns = [{"name": "a", "unit": "b", "reason": "c"}]
    for row, message in (
        ({"name": "r", "preset": "tnl-70m", "published": [1, 2]}, "row 'r': 2 values for 1 columns"),
        ({"name": "r", "published": [1]}, "row 'r': give either preset or reason"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(Table, {"title": "t", "columns": columns, "rows": [row]}, "test")
