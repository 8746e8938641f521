"""Fixtures for the commands, which run in this process, and a finished run for those that read one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalin.__main__ import main
from tests.model_runs import write_config

Fails = Callable[..., str]


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny config file."""
    return write_config(tmp_path_factory.mktemp("config"), checkpoint={"every_steps": 2})


@pytest.fixture(scope="session")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of this config; read-only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", str(config), "--folder", str(folder)]) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The finished run in a folder of the test's own, to which commands may write."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text((trained / "config.toml").read_text())
    for name in ("checkpoints", "metrics.jsonl"):
        (folder / name).symlink_to(trained / name)
    return folder


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Function that runs a command, requires its exit code, and returns its error message."""

    def run(code: int, *arguments: str | os.PathLike[str]) -> str:
        assert main([str(argument) for argument in arguments]) == code
        return capsys.readouterr().err

    return run
