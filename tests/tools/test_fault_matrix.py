"""Fault matrix and its companions: each can fail, and a part of each runs for real."""

import json
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import chaos
import crashpoints
import faults
import fuzz_checkpoints
import pytest
import soak
from fault_matrix import matrix, table
from fault_matrix.lab import Check

from megalin.data.datasets.token import TokenDataset
from megalin.files import remove
from tests.ranks import fork_context

TOOLS = Path(__file__).parents[2] / "tools"


def test_every_fault_is_in_the_table_once():
    assert matrix.numbers() == [f"F{number:02d}" for number in range(1, 73)]


@pytest.mark.parametrize(
    ("held", "expected"), [([], "FAIL"), ([True, True], "PASS"), ([True, False], "PARTLY"), ([False, True], "FAIL")]
)
def test_the_first_check_decides_between_partly_and_fail(held, expected):
    assert matrix.verdict([Check("check", holds, "") for holds in held]) == expected


@pytest.fixture
def server_of_ranks(monkeypatch):
    """Forks the commands of rows where ranks are forked, and leaves that server running for other files."""
    fork_context()
    forkserver.ensure_running()
    monkeypatch.setattr(faults, "stop_server", lambda: None)


def test_a_row_that_does_not_hold_is_printed_and_fails_the_tool(server_of_ranks, monkeypatch, capsys, tmp_path):
    attempts = []

    def partly(lab):
        lab.check("safe", True)
        lab.check("within 5 s", len(attempts) != 1, "7.0 s")  # the second of three injections
        attempts.append(lab.folder)

    monkeypatch.setitem(table.FAULTS, "F11", table.FaultRow("a pipe", partly))
    assert faults.main(["F11", "--repeat", "3", "--json", str(tmp_path / "rows")]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("F11  PARTLY")
    assert first.endswith("a pipe: within 5 s (7.0 s)")
    assert last == "0 of 1"
    assert len(set(attempts)) == 3
    assert json.loads((tmp_path / "rows").read_text().splitlines()[0])["verdict"] == "PARTLY"


def test_the_program_refuses_an_unknown_fault():
    code, text = _tool("faults.py", "F99")
    assert code == 2
    assert "no fault F99; known are F01 to F72" in text


def test_a_save_that_first_removes_the_checkpoint_before_is_found(monkeypatch, tmp_path):
    save = crashpoints._save

    def unsafe(root, step, **options):
        if step == 3:
            for old in root.glob("step-*"):
                remove(old)
        save(root, step, **options)

    found = crashpoints.crash_points(tmp_path / "good", every=9)
    assert found == (3, 0, 0)
    monkeypatch.setattr(crashpoints, "_save", unsafe)
    assert crashpoints.crash_points(tmp_path / "bad", every=9).lost >= 2


def test_a_checkpoint_that_is_not_verified_is_found(monkeypatch, tmp_path):
    found = fuzz_checkpoints.fuzz(tmp_path / "good", count=40, seed=0)
    assert found["refused"] + found["unchanged"] == 40
    monkeypatch.setattr("megalin.checkpoint.verification.file_problems", lambda *_, **__: [])
    found = fuzz_checkpoints.fuzz(tmp_path / "bad", count=40, seed=0)
    assert found["accepted"] > 0


def test_growth_is_measured_from_the_second_quarter_to_the_last():
    def run(last):
        steady = [soak.Measurement(step, 100, 20, 5) for step in range(0, 75, 2)]
        return [*steady, *(last._replace(step=step) for step in range(75, 100, 2))]

    assert soak.growth(run(soak.Measurement(0, 100, 20, 5)), 100) == (0.0, 0, 0)
    memory, descriptors, threads = soak.growth(run(soak.Measurement(0, 103, 22, 6)), 100)
    assert (round(memory, 3), descriptors, threads) == (0.03, 2, 1)
    with pytest.raises(ValueError, match="0 and 0 measurements are too few"):
        soak.growth([], 100)


def _tool(*command):
    done = subprocess.run([sys.executable, *command], cwd=TOOLS, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_quick_part_of_the_matrix_passes(server_of_ranks, capsys):
    code = faults.main([])
    text = capsys.readouterr().out
    assert code == 0, text
    assert text.splitlines()[-1] == f"{len(faults.QUICK)} of {len(faults.QUICK)}"


@pytest.mark.slow
def test_every_row_of_the_matrix_that_is_built_passes():
    code, text = _tool("faults.py", "--all")
    assert code == 0, text
    assert text.splitlines()[-1] == f"{len(table.FAULTS)} of {matrix.counted(matrix.numbers())}"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--background"]])
def test_killed_run_ends_as_the_undisturbed_one(options):
    code, text = _tool("chaos.py", "--kills", "3", *options)
    assert code == 0, text
    assert "3 kills" in text
    assert "ledger equal, final weights equal" in text


def _train_on_other_samples():
    """This process reads sample 0 in the place of all others."""
    read = TokenDataset.batch
    TokenDataset.batch = lambda dataset, samples: read(dataset, samples * 0)


@pytest.mark.slow
def test_killed_process_that_reads_other_samples_is_found(tmp_path):
    found = chaos.torment(tmp_path / "chaos", kills=1, seed=0, steps=12, change=_train_on_other_samples)
    assert not found.same_ledger
    assert not found.same_weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--errno", "ENOSPC"], ["--background"], ["--background", "--errno", "ENOSPC"]]
)
def test_every_operation_of_a_save_is_a_crash_point(options):
    code, text = _tool("crashpoints.py", *options)
    assert code == 0, text


@pytest.mark.slow
def test_long_run_does_not_grow():
    code, text = _tool("soak.py", "--steps", "600", "--growth", "3")
    assert code == 0, text
