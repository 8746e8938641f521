"""The environment of a run: its command, and the commit of a checkout."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from megalin.train.environment import command, source_commit


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, "megalin train mine.toml 'data.train=[a, b]'"),
        (SimpleNamespace(name="megalin.__main__"), "python -m megalin train mine.toml 'data.train=[a, b]'"),
    ],
)
def test_command_is_one_for_a_shell(monkeypatch, spec, expected):
    monkeypatch.setattr(sys, "argv", ["/opt/venv/bin/megalin", "train", "mine.toml", "data.train=[a, b]"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert command() == expected


def test_commit_is_that_of_the_checkout_itself(tmp_path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "installed").mkdir()
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("-c", "core.hooksPath=/dev/null", "commit", "-q", "-m", "one")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert source_commit(tmp_path) == commit
    assert source_commit(tmp_path / "installed") is None
    source_commit.cache_clear()
    (tmp_path / "file").write_text("b")
    assert source_commit(tmp_path) == f"{commit}-dirty"
    source_commit.cache_clear()
    (tmp_path / ".git" / "HEAD").write_text("damaged")
    assert source_commit(tmp_path) is None
    source_commit.cache_clear()
