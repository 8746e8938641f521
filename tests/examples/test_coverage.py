"""The table of docs/coverage.md: complete, with files, tests and decisions that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROWS = [
    re.split(r" \| ", line.strip("| "))
    for line in (DOCS / "coverage.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]
DECISIONS, OUT_OF_SCOPE = re.split(r"^## Out of scope$", (DOCS / "models.md").read_text(encoding="utf-8"), flags=re.M)
DECISIONS = DECISIONS.partition("## Decisions")[2]


@cache
def content(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def missing(cell: str) -> list[str]:
    """References `FILE` and `FILE::NAME` of a cell whose file or name does not exist."""
    found = []
    for reference in re.findall(r"`([^`]+)`", cell):
        path, _, name = reference.partition("::")
        test = Path(path).name.startswith("test_")
        pattern = rf"^def {name}\(" if test else rf'"{re.escape(name)}"|^\[{re.escape(name)}\]$'
        exists = (ROOT / path).is_file() and bool(name or not test)
        if not exists or (name and not re.search(pattern, content(path), re.MULTILINE)):
            found.append(reference)
    return found


def notes_that_lead_nowhere(cell: str) -> list[str]:
    """Links of a cell to a decision or to a line of what is out of scope that does not exist."""
    return [
        text
        for text, target in re.findall(r"\[([^]]+)\]\(models\.md#([\w-]+)\)", cell)
        if not re.search(rf"^\| {re.escape(text)}", DECISIONS if target == "decisions" else OUT_OF_SCOPE, re.MULTILINE)
    ]


def test_the_table_has_every_row_once_and_its_counts():
    assert [int(row[0]) for row in ROWS] == list(range(1, 140))
    statuses = r"^\| (present|decided|later) \|.* \| (\d+) \|$"
    counts = dict(re.findall(statuses, content("docs/coverage.md"), re.MULTILINE))
    assert counts == {status: str(sum(row[3] == status for row in ROWS)) for status in counts}
    assert sum(map(int, counts.values())) == len(ROWS)


def problems(row: list[str]) -> list[str]:
    """References of a row that lead nowhere, and cells that its status lacks or cannot have."""
    number, _, _, status, files, tests, notes = row
    found = [*missing(files), *missing(tests), *notes_that_lead_nowhere(notes)]
    if (files != "-", tests != "-") != ((True, True) if status == "present" else (False, False)):
        found.append(f"files and tests of a row that is {status}")
    if status != "present" and "](models.md#" not in notes:
        found.append("no decision")
    return [f"row {number}: {problem}" for problem in found]


def test_files_tests_and_decisions_of_every_row_exist():
    assert [problem for row in ROWS for problem in problems(row)] == []


def test_every_decision_has_its_reason():
    rows = [line.strip("| ").split(" | ") for line in DECISIONS.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 28))
    assert all(len(row) == 5 and len(row[3]) > 10 for row in rows)
