"""Mutation check: its mutations match the code, and it reports a mutation that no test detects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import mutation_check
from tools.mutation_check import MUTATIONS, ROOT, Mutation, find_symbol, main, mutate

SOURCE = """\
import functools

LIMIT = 2


@functools.cache
def double(x):
    return LIMIT * x


class Triple:
    limit: int = 3

    def of(self, x):
        def inner(x):
            return self.limit * x

        return inner(x)


if LIMIT:

    def quadruple(x):
        return 4 * x
"""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_mutations_change_one_place_each_and_name_tests_that_exist(mutation: Mutation):
    mutated = mutate(mutation, (ROOT / mutation.file).read_text())
    if mutation.file.endswith(".py"):
        ast.parse(mutated)  # a file that does not compile would fail every test
    path, _, test = mutation.tests.partition("::")
    defined = len(find_symbol((ROOT / path).read_text(), test))
    assert defined == 1, f"mutation {mutation.name}: {path} defines {test} {defined} times; set tests to where it is"


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    ("symbol", "first", "last"),
    [
        ("", "import functools", "        return 4 * x"),
        ("LIMIT", "LIMIT = 2", "LIMIT = 2"),
        ("double", "@functools.cache", "    return LIMIT * x"),
        ("Triple.limit", "    limit: int = 3", "    limit: int = 3"),
        ("Triple.of", "    def of(self, x):", "        return inner(x)"),
        ("Triple.of.inner", "        def inner(x):", "            return self.limit * x"),
        ("quadruple", "    def quadruple(x):", "        return 4 * x"),
    ],
)
def test_symbol_is_found_by_its_dotted_name(symbol: str, first: str, last: str):
    (place,) = find_symbol(SOURCE, symbol)
    lines = SOURCE[place].splitlines()
    assert (lines[0], lines[-1]) == (first, last)


def test_symbol_without_a_final_newline_ends_with_the_text():
    assert find_symbol("LIMIT = 2", "LIMIT") == [slice(0, 9)]


def mutation_of(symbol: str, pattern: str, replacement: str) -> Mutation:
    return Mutation("wrong", "double.py", symbol, pattern, replacement, "tests")


def test_only_the_symbol_is_changed():
    mutated = mutate(mutation_of("Triple.of.inner", r"self\.(\w+)", r"-\g<0>"), SOURCE)
    assert mutated == SOURCE.replace("return self.limit * x", "return -self.limit * x")
    mutated = mutate(mutation_of("double", r"return (\w+) \* x", r"return x / \1"), SOURCE)
    assert mutated == SOURCE.replace("return LIMIT * x", "return x / LIMIT")


@pytest.mark.parametrize(("symbol", "count"), [("halve", 0), ("Triple.double", 0), ("inner", 0), ("twice", 2)])
def test_symbol_that_is_not_defined_once_is_reported(symbol: str, count: int):
    message = rf"mutation wrong: double\.py defines {symbol} {count} times, not once; set file and symbol in tools/mut"
    with pytest.raises(SystemExit, match=message):
        mutate(mutation_of(symbol, "x", "y"), SOURCE + "twice = 1\ntwice = 2\n")


@pytest.mark.parametrize(("pattern", "count"), [("LIMIT / x", 0), ("x", 2)])
def test_pattern_that_does_not_match_once_is_reported(pattern: str, count: int):
    message = (
        rf"mutation wrong: in double \(double\.py\) the pattern '{pattern}' matches {count} times, not once; adapt"
    )
    with pytest.raises(SystemExit, match=message):
        mutate(mutation_of("double", pattern, "y"), SOURCE)


def test_replacement_that_changes_nothing_is_reported():
    message = r"mutation wrong: in the whole file \(double\.py\) the replacement changes nothing: 'LIMIT = 2'; adapt it"
    with pytest.raises(SystemExit, match=message):
        mutate(mutation_of("", "LIMIT = .", r"LIMIT = 2"), SOURCE)


def test_unknown_name_is_reported():
    with pytest.raises(SystemExit, match=r"unknown: state_exchange_drops_delay; known: state_exchange_drops_decay, "):
        main(["state_exchange_drops_delay"])


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of one module and one test, which detects one of two mutations."""
    root = tmp_path / "root"
    (root / "megalin").mkdir(parents=True)
    (root / "megalin" / "__init__.py").write_text("def double(x):\n    return 2 * x\n\n\nUNREAD = 1\n")
    (root / "test_double.py").write_text("import megalin\n\n\ndef test_double():\n    assert megalin.double(3) == 6\n")
    (root / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    monkeypatch.setattr(mutation_check, "ROOT", root)
    monkeypatch.setattr(
        mutation_check,
        "MUTATIONS",
        (
            Mutation("triple", "megalin/__init__.py", "double", r"2 \*", "3 *", "test_double.py"),
            Mutation("unread", "megalin/__init__.py", "UNREAD", "1", "2", "test_double.py"),
        ),
    )
    return root


def test_survivor_is_reported_and_fails(tree: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["triple"]) == 0
    assert capsys.readouterr().out.startswith("red       triple")
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "SURVIVED  unread" in printed
    assert printed.endswith("1 of 2 mutations were noticed\n")


def test_tests_that_are_red_without_a_change_are_reported(tree: Path):
    (tree / "test_double.py").write_text("def test_double():\n    assert False\n")
    with pytest.raises(SystemExit, match=r"test_double\.py -k '' is red without any change; make it green first"):
        main(["triple"])


def test_tests_that_do_not_run_are_reported(tree: Path):
    (tree / "test_double.py").unlink()
    with pytest.raises(SystemExit, match=r"did not run:"):
        main(["triple"])
