"""A run folder of commit a56b670, with config keys since renamed, resumes, evaluates and generates as in that commit.

tests/fixtures/run_a56b670 holds the shards, the run folder after 4 of 8 steps, and in expected.json the results of that
commit's code: steps 5 to 8; from step 4, `megalin eval --json` and `megalin generate --prompt abc --max-tokens 8`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalin.__main__ import main
from megalin.parallel.process_group import process_group
from tests.model_runs import CPU, ledger, metrics, steps_saved, train_here

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_a56b670"
BOUND = 1e-5
"""Relative error; vectorised and other CPUs differ by 1e-7."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run folder, in the folder that the paths of its config are relative to."""
    shutil.copytree(FIXTURE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return Path("run")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads((FIXTURE / "expected.json").read_text())


def resume(config: Path, run: Path) -> None:
    with process_group(CPU):
        train_here(config, run, "train.stop_after_steps=8")


def assert_same_steps(run: Path, expected: dict[str, Any]) -> None:
    found = metrics(run)[4:]
    assert [line["step"] for line in found] == [5, 6, 7, 8]
    for line, known in zip(found, expected["metrics"], strict=True):
        assert {name: line[name] for name in known} == pytest.approx(known, rel=BOUND)
    assert ledger(run)[4:] == expected["ledger"]


def test_old_run_goes_on_with_its_own_config(run, expected):
    resume(run / "config.toml", run)
    assert_same_steps(run, expected)
    assert steps_saved(run) == [6, 8]  # the newest two, as its config says


def test_old_run_is_evaluated(run, expected, capsys):
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected["evaluation"], rel=BOUND)


def test_old_run_generates(run, expected, capsys):
    assert main(["generate", str(run), "--prompt", "abc", "--max-tokens", "8", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{expected['generated']}\n"
