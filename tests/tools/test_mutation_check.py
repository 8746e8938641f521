"""The mutation check: its mutations are in step with the code, and it tells one that no test notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import mutation_check
from tools.mutation_check import MUTATIONS, ROOT, Mutation, check, main


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_mutations_change_one_place_each_and_name_tests_that_exist(mutation: Mutation):
    check(mutation, holds=(ROOT / mutation.file).read_text())
    path, _, test = mutation.tests.partition("::")
    assert f"def {test}" in (ROOT / path).read_text()
    assert mutation.old != mutation.new


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_text_that_is_not_there_once_is_told():
    with pytest.raises(SystemExit, match=r"mutation fold_drops_decay: .*fold\.py holds .* 2 times, not once; bring"):
        check(MUTATIONS[0], holds=MUTATIONS[0].old * 2)


def test_unknown_name_is_told():
    with pytest.raises(SystemExit, match=r"unknown: fold_drops_delay; known: fold_drops_decay, "):
        main(["fold_drops_delay"])


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of one module and one test, which sees one of two mutations."""
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
            Mutation("triple", "megalin/__init__.py", "2 * x", "3 * x", "test_double.py"),
            Mutation("unread", "megalin/__init__.py", "UNREAD = 1", "UNREAD = 2", "test_double.py"),
        ),
    )
    return root


def test_survivor_is_told_and_fails(tree: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["triple"]) == 0
    assert capsys.readouterr().out.startswith("red       triple")
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "SURVIVED  unread" in printed
    assert printed.endswith("1 of 2 mutations were noticed\n")


def test_tests_that_are_red_without_a_change_are_told(tree: Path):
    (tree / "test_double.py").write_text("def test_double():\n    assert False\n")
    with pytest.raises(SystemExit, match=r"test_double\.py -k '' is red without any change; make it green first"):
        main(["triple"])


def test_tests_that_do_not_run_are_told(tree: Path):
    (tree / "test_double.py").unlink()
    with pytest.raises(SystemExit, match=r"did not run:"):
        main(["triple"])
