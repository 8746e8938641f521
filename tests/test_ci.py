"""CI's script runs the committed state in a folder named megalin, as a clone's is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
echo "$1 in $(basename "$(pwd)"):" *
pwd >"$PLACE"
exit 3
"""


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *arguments], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("checkout", "test in megalin: committed\n"), ("megalin", "test in megalin: committed uncommitted\n")],
)
def test_ci_tests_in_a_folder_named_megalin(folder, expected, tmp_path):
    checkout, programs = tmp_path / folder, tmp_path / "bin"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", checkout / ".ci/run")
    (checkout / "committed").touch()
    _git(checkout, "init", "--quiet")
    _git(checkout, "add", ".")
    _git(checkout, "commit", "--quiet", "--message", "x")
    (checkout / "uncommitted").touch()
    programs.mkdir()
    (programs / "make").write_text(MAKE)
    (programs / "make").chmod(0o755)
    place = tmp_path / "place"
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PLACE": str(place)}
    run = subprocess.run([checkout / ".ci/run"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (3, expected), run.stderr
    assert Path(place.read_text().strip()).exists() == (folder == "megalin")
