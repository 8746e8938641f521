"""Progress of a pass: lines when stderr is no terminal, and silence if another process shows the progress."""

import pytest

from megalin.data.corpus.parts import CorpusProgress
from megalin.data.corpus.progress import shown_progress
from megalin.errors import ConfigError


def test_lines_bear_the_name_of_their_pass(capsys):
    for title in ("one", "two"):
        with shown_progress(title, 100, interval=10) as report:
            for documents in (5, 12, 19, 25):
                report(CorpusProgress(documents, 0, 4 * documents, 1))
    shown = [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["one: 12 documents", "one: 25 documents", "two: 12 documents", "two: 25 documents"]


@pytest.mark.parametrize("terminal", ["", "1"])
def test_progress_that_another_process_shows_is_silent(capsys, monkeypatch, terminal):
    monkeypatch.setenv("FORCE_COLOR", terminal)
    with shown_progress("one", 100, interval=1, shown=False) as report:
        report(CorpusProgress(5, 0, 20, 0))
    assert capsys.readouterr().err == ""
    with shown_progress("one", 100, interval=1) as report:
        report(CorpusProgress(5, 0, 20, 0))
    assert "one: 5 documents" in capsys.readouterr().err


def test_interval_below_one_is_refused():
    with pytest.raises(ConfigError, match="--log-interval 0: must be at least 1"), shown_progress("x", 1, interval=0):
        pass
