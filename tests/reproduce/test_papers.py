"""Published tables: complete, with presets and measures that exist, and the numbers that the papers print."""

from __future__ import annotations

import pydantic
import pytest

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.reproduce import computed, runs
from megalin.reproduce.papers import Column, Table, load_paper, load_table, paper_names
from megalin.reproduce.tables import ReproducedRow, reproduce
from tests.planner.table12 import plan_bytes

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
    ("rodimus", "4", "GLA", "state", "256 x d", 256),
    ("rodimus", "4", "Hawk", "state", "1 x d", 1),
    ("rodimus", "4", "Mamba", "state", "16 x 2d", 32),
    ("hgrn2", "3", "HGRN2 128", "loss", 2.195, None),
    ("hgrn2", "5", "HGRN2", "parameters", 44.66, 44.66),
    ("hgrn2", "5", "HGRN2", "PPL (test)", 23.73, None),
    ("hgrn2", "6", "HGRN2 0.39B", "HS", 46.16, None),
    ("hgrn2", "10", "2.9B", "parameters", 2.9, 3.0),
    ("hgrn2", "10", "0.385B", "expansion", 128, 128),
    ("hgrn2", "figure-3", "d = 64", "64 tokens, 4 pairs", "curve", None),
    ("transnormerllm", "1", "TransNormerLLM 1B", "loss", 1.896, None),
    ("transnormerllm", "2", "TransNormer-T2", "PPL", 4.858, None),
    ("transnormerllm", "3", "APE", "parameters", 386, 386),
    ("transnormerllm", "4", "without", "loss", 2.258, None),
    ("transnormerllm", "5", "without", "parameters", 379, 360),
    ("transnormerllm", "6", "1+elu", "PPL", 4.767, None),
    ("transnormerllm", "7", "Swish", "loss", 2.254, None),
    ("transnormerllm", "8", "LayerNorm", "PPL", 4.765, None),
    ("transnormerllm", "10", "385M", "parameters", 384_974_848, 384_937_984),
    ("transnormerllm", "10", "65B", "parameters", 63_528_009_728, 63_528_009_728),
    ("transnormerllm", "13", "Transformer 175B", "speed", 106.2, None),
    ("transnormerllm", "14", "TransNormerLLM 175B", "context", 12, None),
    ("rodimus", "4", "Mamba2", "state", "128 x 2d", 256.0),
    ("rodimus", "4", "Rodimus", "state", "64 x 2d", 128.0),
    ("rodimus", "5", "Pile subset", "steps", 13351, None),
    ("rodimus", "6", "Rodimus", "PPL (valid)", 5.88, None),
    ("rodimus", "7", "Rodimus, 4.7 MB", "PPL", 7.35, None),
    ("rodimus", "8", "Rodimus 1.3B", "parameters", 1300, 1376),
    ("rodimus", "9", "0.46", "parameters", 0.46, 0.46),
    ("rodimus", "12", "l = 64, 350M", "parameters", 373.2, 373.2),
    ("rodimus", "13", "n = 256, 125M", "parameters", 162.8, 162.8),
    ("rodimus", "14", "Transformer++ GQA", "cache", 25.2, 25.2),
    ("rodimus", "14", "Rodimus+ SKA", "cache", 24.4, 24.5),
    ("rodimus", "15", "beta-hat, g, tau", "best PPL (test)", 20.84, None),
    ("rodimus", "16", "product of beta_j", "PPL (test)", 24.36, None),
    ("rodimus", "17", "24 blocks, without", "PPL (test)", 21.52, None),
    ("rodimus", "18", "X + Rodimus, WikiText-103", "PPL", 21.95, None),
    ("rodimus", "19", "Rodimus", "FLOPs", 3.6, 3.5),
    ("rodimus", "20", "Transformer (torch), 24K", "cache", 4831.8, 4831.8),
    ("rodimus", "20", "Rodimus, 4K", "FLOPs", 2.9, 2.8),
    ("denseattention", "2", "DANet + Cosine RelPE", "accuracy", 83.98, None),
    ("denseattention", "3", "1 head, N = 1024, at 1024", "accuracy", 0.545, None),
    ("denseattention", "4", "65,536", "FLOPs ratio", 1.3, 1.3),
    ("denseattention", "6", "Books, 4,096", "MLM loss", 2.45, None),
    ("denseattention", "9", "base", "parameters", 110, 110),
]


@pytest.mark.parametrize(("paper", "key"), TABLES)
def test_every_measure_exists_and_every_count_is_made(paper: str, key: str):
    table = load_table(paper, key)
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)
    assert len({row.name for row in table.rows}) == len(table.rows)
    for column in table.columns:
        assert set(column.columns) <= set(names)
        known = {*computed.MEASURES, computed.PLANNED, *runs.MEASURES, "mean", None}
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
        assert cell._replace(published=ours).equal, cell
        assert cell.equal is (printed == ours)


def planned(*names: str) -> list[ReproducedRow]:
    table = load_table("transnormerllm", "12")
    return reproduce(table.model_copy(update={"rows": [row for row in table.rows if row.name in names]}), [])


def test_planned_memory():
    """As tests/planner/test_table12.py has it for the same layout, and below the paper's."""
    (row,) = planned("TransNormerLLM-7B, 8")
    assert row.cells[0].published == 24.1
    assert row.cells[0].ours == pytest.approx(plan_bytes(8) / 1e9, rel=1e-12)


@pytest.mark.slow
def test_planned_memory_of_every_row():
    rows = planned(*(row.name for row in load_table("transnormerllm", "12").rows))
    memory = [row.cells[0].ours or 0.0 for row in rows]
    assert len(rows) == 8
    assert all(10.0 < each < 40.0 for each in memory)
    assert memory[:4] == sorted(memory[:4], reverse=True)
    assert memory[4:] == sorted(memory[4:], reverse=True)


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
