"""`megalin verify`: the mesh of a run's config file and its overrides; tests/verify has the comparison itself."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megalin.__main__ import main
from megalin.commands import verify
from megalin.verify.case import Case
from megalin.verify.comparison import TensorError
from tests.commands.conftest import Fails
from tests.model_runs import write_config


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The comparisons that the command starts, in place of their ranks."""
    started: list[Case] = []

    def compare(_: object, case: Case) -> list[TensorError]:
        started.append(case)
        return [TensorError("loss", 0.0, 1e-10)]

    monkeypatch.setattr(verify, "_on_new_ranks", compare)
    monkeypatch.setattr(verify, "print_faults", lambda *_, as_json: True)
    return started


def test_a_run_s_config_gives_the_model_the_mesh_and_recomputation(cases: list[Case], tmp_path: Path):
    """Its other keys are not read: cp 3 does not divide its sequences, nor its batch the data axis."""
    tables = {"parallel": {"tp": 2, "zero": 1}, "train": {"recompute": True, "global_batch_size": 7}}
    path = str(write_config(tmp_path, **tables))
    assert main(["verify", path, "--world-size", "4"]) == 0
    assert main(["verify", path, "parallel.cp=3", "--json", "train.recompute=false", "parallel.tp=1"]) == 0
    assert main(["verify", path, "--grid", "--world-size", "1"]) == 0
    found = [(c.world_size, c.parallel.tp, c.parallel.cp, c.data_size, c.parallel.zero, c.recompute) for c in cases]
    assert found == [(4, 2, 1, 2, 1, True), (3, 1, 3, 1, 1, False), (1, 1, 1, 1, None, True)]
    assert {case.dtype for case in cases} == {"float64"}


def test_a_mesh_that_the_model_s_own_size_does_not_fit_is_refused(
    cases: list[Case], tmp_path: Path, fails: Fails, capsys: pytest.CaptureFixture[str]
):
    """The shrunk model has heads for every rank of any mesh, the run's model has four."""
    path = str(write_config(tmp_path))
    assert "model.layers.0.sublayers.0.num_heads = 4" in fails(2, "verify", path, "parallel.tp=3")
    assert not cases
    assert main(["verify", path, "--grid", "--world-size", "3"]) == 0
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tp 3 ")]
    assert len(refused) == 2
    reason = r"tp 3 .* refused .*num_heads = 4.* are not divisible by parallel.tp = 3; use tp 1, 2, 4"
    assert all(re.fullmatch(reason, line) for line in refused)
    assert {case.parallel.tp for case in cases} == {1, 2}


def test_a_wrong_value_in_the_file_is_named(tmp_path: Path, fails: Fails):
    path = write_config(tmp_path, parallel={"tp": 0}, train={"recompute": 1})
    error = fails(2, "verify", path)
    assert f"{path}: 2 problem(s)" in error
    assert "parallel.tp = 0: input should be greater than or equal to 1" in error
    assert "train.recompute = 1: input should be a valid boolean" in error


def test_examples_of_the_help_run(
    cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path).rename("run.toml")
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    commands = re.findall(r"megalin verify (.*)", capsys.readouterr().out.partition("examples:")[2])
    assert len(commands) == 6
    for command in commands:
        started = len(cases)
        assert main(["verify", *shlex.split(command)]) == 0, command
        assert len(cases) > started, command


def test_an_option_in_place_of_a_key_ends_with_the_form_of_a_key(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["verify", "tnl-70m", "--tp", "2"])
    assert "unrecognized arguments: --tp 2; write keys of the config as parallel.tp=2" in capsys.readouterr().err
