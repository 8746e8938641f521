"""The event log of a run: kept across resumptions, with warnings and the last error, which still take effect."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from megalin.errors import ConfigError, NumericError, StorageError
from megalin.train.events import EventLog

_log = logging.getLogger("megalin.somewhere")


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]


def _end(path: Path, step: int, done: int, error: BaseException) -> None:
    with EventLog(path) as event_log:
        event_log.begin(step, "on 1 x cpu")
        event_log.step = done
        raise error


def _fail_early(path: Path, error: BaseException) -> None:
    with EventLog(path):
        _log.warning("checkpoint skipped")
        raise error


def test_error_that_ends_the_run_is_the_last_incident(tmp_path):
    for step, done, error in ((0, 7, NumericError("step 8: loss nan")), (5, 5, KeyboardInterrupt())):
        with pytest.raises(type(error)):
            _end(tmp_path / "incidents.jsonl", step, done, error)
    found = [(line["step"], line["kind"], line["message"]) for line in _lines(tmp_path)]
    assert found == [
        (0, "started", "on 1 x cpu"),
        (7, "error", "NumericError: step 8: loss nan"),
        (5, "resumed", "on 1 x cpu"),
        (5, "error", "KeyboardInterrupt: "),
    ]
    assert all(line["time"].endswith("+00:00") for line in _lines(tmp_path))


def test_warnings_of_megalin_are_noted_between_enter_and_exit(tmp_path):
    with EventLog(tmp_path / "incidents.jsonl") as event_log:
        event_log.step = 3
        assert event_log.last == ""
        _log.info("not this")
        logging.getLogger("torch").warning("nor this")
        _log.warning("%s passed over", "step-00000003")
        assert event_log.last.endswith(" warning: step-00000003 passed over")
    _log.warning("too late")
    assert [(line["step"], line["message"]) for line in _lines(tmp_path)] == [(3, "step-00000003 passed over")]


def test_a_warning_that_no_one_handles_is_printed_as_ever(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    with EventLog(tmp_path / "incidents.jsonl"):
        _log.warning("a kernel fell back")
    assert capsys.readouterr().err == "a kernel fell back\n"
    assert len(_lines(tmp_path)) == 1


def test_line_that_a_crash_tore_is_cut_off(tmp_path):
    (tmp_path / "incidents.jsonl").write_text('{"step": 2, "kind": "started"}\n{"step": 4, "ki')
    with EventLog(tmp_path / "incidents.jsonl") as event_log:
        event_log.begin(2, "on 1 x cpu")
    assert [line["kind"] for line in _lines(tmp_path)] == ["started", "resumed"]


def test_full_disk_does_not_end_the_run(tmp_path, caplog):
    with EventLog(tmp_path / "incidents.jsonl") as event_log, Path("/dev/full").open("wb") as full:
        event_log.begin(0, "on 1 x cpu")
        os.dup2(full.fileno(), event_log._file._file._descriptor)
        for _ in range(2):
            _log.warning("a kernel fell back")
    warning = "incidents.jsonl cannot be written (No space left on device)"
    assert [warning in message for message in caplog.messages] == [True, False, False]


def test_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"none/incidents\.jsonl: cannot be written \(No such file"):
        EventLog(tmp_path / "none" / "incidents.jsonl").begin(0, "on 1 x cpu")


def test_lines_before_the_start_are_those_of_a_run_unless_it_is_refused(tmp_path, caplog):
    for error, kinds in ((ConfigError("no"), []), (KeyboardInterrupt(), ["warning", "error"])):
        with pytest.raises(type(error)):
            _fail_early(tmp_path / "incidents.jsonl", error)
        lines = _lines(tmp_path) if kinds else []
        assert [line["kind"] for line in lines] == kinds
        assert (tmp_path / "incidents.jsonl").exists() == (kinds != [])
    with pytest.raises(KeyboardInterrupt):
        _fail_early(tmp_path / "none" / "incidents.jsonl", KeyboardInterrupt())
    assert "none/incidents.jsonl: cannot be written" in caplog.text
