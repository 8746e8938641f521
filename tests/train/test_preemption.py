"""The first SIGTERM or Ctrl-C is recorded; a second Ctrl-C ends the process, unless a launcher has repeated it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import megalin.train.preemption as preemption
from megalin.parallel.heartbeats import VARIABLE
from megalin.train.preemption import PreemptionHandler

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    handlers = {number: signal.getsignal(number) for number in BOTH}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", BOTH)
def test_a_second_ctrl_c_ends_the_process_and_other_signals_change_nothing(monkeypatch, capfd, first):
    now = 100.0
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    with PreemptionHandler() as handler:
        assert handler.received == ""
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)  # of a launcher that forwards what the terminal has sent
        assert handler.received == first.name
        now += 1.5
        os.kill(os.getpid(), signal.SIGTERM)
        assert handler.received == first.name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr().err.count("Ctrl-C once more ends at once") == (first is signal.SIGINT)


def test_an_ignored_ctrl_c_stays_ignored_except_on_ranks_of_the_launcher(monkeypatch, capfd):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with PreemptionHandler() as handler:
        os.kill(os.getpid(), signal.SIGINT)
        assert handler.received == ""
    monkeypatch.setenv(VARIABLE, "a file")
    now = 100.0
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    with PreemptionHandler() as handler:
        os.kill(os.getpid(), signal.SIGINT)
        now += 1.5
        os.kill(os.getpid(), signal.SIGINT)  # the launcher ends its ranks
        assert handler.received == "SIGINT"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert capfd.readouterr().err == ""
