"""The process of a command: its environment before the libraries are loaded."""

from __future__ import annotations

import gc
import os

import pytest

from megalin import __main__


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_idle_threads_soon_sleep_unless_the_user_chose_otherwise(monkeypatch: pytest.MonkeyPatch, given, spin_count):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # what the command sets is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []
    monkeypatch.setattr(__main__, "main", lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")) or 3)
    monkeypatch.setattr(os, "_exit", lambda code: seen.append(str(code)))
    try:
        __main__.run()
    finally:
        gc.enable()
    assert seen == [spin_count, "3"]
