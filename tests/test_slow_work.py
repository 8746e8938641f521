"""Lines of slow work: none for short work, and the time and fraction of long work on standard error."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from megalin import slow_work as module
from megalin.slow_work import slow_work


class Lines(io.StringIO):
    """Standard error that signals when it has a number of lines with a fraction of a half."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted, self.has_lines = wanted, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count(", 50% done\n") >= self.wanted:
            self.has_lines.set()
        return written


def test_long_work_prints_its_time_and_fraction(monkeypatch):
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.001)
    monkeypatch.setattr(module, "NEXT_SECONDS", 0.001)
    lines = Lines(3)
    monkeypatch.setattr(sys, "stderr", lines)
    with pytest.raises(KeyError), slow_work("loading x") as report:  # noqa: PT012
        report(0.5)
        assert lines.has_lines.wait(60)
        raise KeyError
    first, *_, last = lines.getvalue().splitlines()
    assert re.fullmatch(r"loading x: \d+ s(, 50% done)?", first)
    assert re.fullmatch(r"loading x: ended after \d+ s", last)
    assert "slow_work" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("shown", [True, False])
def test_short_and_hidden_work_print_nothing(monkeypatch, capsys, shown):
    monkeypatch.setattr(module, "FIRST_SECONDS", 1000.0 if shown else 0.0)
    with slow_work("loading x", shown=shown) as report:
        report(0.5)
    assert capsys.readouterr().err == ""
