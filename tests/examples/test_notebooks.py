"""The notebooks of examples/notebooks: plain scripts in cells, each of which runs from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.py"))


def cells(notebook: Path) -> list[str]:
    """The source of the docstring and of each cell."""
    return re.split(r"^# %%.*$", notebook.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(notebook.parent))
    monkeypatch.setattr(sys, "argv", [str(notebook)])
    sources = cells(notebook)
    assert len(sources) > 3
    for source in sources:
        compile(source, str(notebook), "exec")
    # A process of its own would import torch again.
    exec(compile(sources[1], str(notebook), "exec"), {"__name__": "notebook"})  # noqa: S102


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_as_a_script(notebook: Path, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(notebook)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
