"""Escaped output: control characters of names and messages reach neither a terminal nor a log."""

import contextlib
import logging
import os
import sys
from typing import Any

import pytest

from megalin.__main__ import PIPE_CLOSED, main
from megalin.errors import DataError
from megalin.terminal_output import (
    EscapedOutput,
    escape_controls,
    escaped_output,
    exit_code,
    finish_output,
    open_standard_files,
    terminal,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b2J\x7f\x00", "\\x9b2J\\x7f\\x00"),
        ("a\tb\r\nc é 🙂", "a\tb\r\nc é 🙂"),
    ],
)
def test_control_characters_are_escaped(text, expected):
    assert escape_controls(text) == expected


def test_prints_and_logs_of_the_body_are_escaped(capsys):
    with escaped_output():
        print("out\x1b[2J")
        sys.stdout.writelines(["a\x07", "b\n"])
        print("error\x1b]0;title\x07", file=sys.stderr)
        logging.lastResort.handle(logging.LogRecord("megalin", logging.WARNING, "", 0, "log %s", ("\x1b",), None))
    print("\x1b")
    out, error = capsys.readouterr()
    assert out == "out\\x1b[2J\na\\x07b\n\x1b\n"
    assert error == "error\\x1b]0;title\\x07\nlog \\x1b\n"


@pytest.mark.parametrize("arguments", [[], ["completion", "bash"]])  # less and more than a stream's buffer
def test_a_reader_that_ends_early_ends_a_command_without_a_traceback(monkeypatch, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(arguments) == PIPE_CLOSED
        pipe.flush()  # as the interpreter does at its end


FILES = [
    ["train", "run.toml"],
    ["launch", "--nproc-per-node", "2", "run.toml"],
    ["sweep", "sweep.toml", "--folder", "runs"],
    ["ladder", "ladder.toml"],
    ["data", "merge", "--input", "a", "--output-prefix", "b"],
]
"""Commands whose result is files."""
PRINTED = [["params"], ["config", "run.toml"], ["plan", "tnl-1b", "--gpus", "8"], ["generate", "run"], ["eval", "run"]]
"""Commands whose result is what they print."""


KINDS = {"full": "No space left on device", "no reader": "Broken pipe", "closed": "Bad file descriptor"}
"""Kinds of a standard output that cannot be written, with their reasons."""


def _lost(kind: str) -> Any:
    if kind == "closed":
        return None
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w") if kind == "no reader" else open("/dev/full", "w")


@pytest.mark.parametrize("arguments", [*FILES, *PRINTED], ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [1, 10_000])  # less and more than a stream's buffer
def test_lost_output_ends_a_command_whose_result_it_is(monkeypatch, capfd, caplog, kind, arguments, lines):
    def run(_: object) -> int:
        for number in range(lines):
            print("line", number)
        done.append(True)
        return 0

    done: list[bool] = []
    monkeypatch.setattr("megalin.__main__._run", run)
    monkeypatch.setattr(sys, "stdout", stream := _lost(kind))
    code = main(arguments)
    error = capfd.readouterr().err
    if stream is not None:
        stream.flush()  # as the interpreter does at its end
    if arguments in FILES:
        assert (code, done) == (0, [True])
        text = f"standard output cannot be written ({KINDS[kind]}); the command goes on without it"
        assert caplog.messages == [text]
    elif kind == "no reader":
        assert (code, error) == (PIPE_CLOSED, "")
    else:
        assert code == 5
        remedy = "free space, or send the output to another place"
        assert error == f"StorageError: standard output cannot be written: {KINDS[kind]}; {remedy}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_lost_standard_error_ends_nothing(monkeypatch, kind):
    monkeypatch.setattr(sys, "stderr", _lost(kind))
    with escaped_output():
        for _ in range(10_000):
            print("a line", file=sys.stderr, flush=True)
        finish_output()


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_command_counts_more_than_its_lost_output(monkeypatch, capfd, kind):
    def run(_: object) -> int:
        with contextlib.suppress(OSError):
            print("before")
        raise DataError("planted")

    monkeypatch.setattr("megalin.__main__._run", run)
    monkeypatch.setattr(sys, "stdout", _lost(kind))
    assert main(["params"]) == 3
    assert capfd.readouterr().err == "DataError: planted\n"


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_tool_whose_output_is_lost_fails(monkeypatch, capfd, kind):
    monkeypatch.setattr(sys, "stdout", _lost(kind))
    assert exit_code(lambda: print("line", flush=True)) == 5
    assert f"error: standard output cannot be written: {KINDS[kind]}" in capfd.readouterr().err


def test_the_null_device_takes_the_place_of_closed_streams():
    pid = os.fork()
    if pid == 0:
        os.closerange(0, 3)
        open_standard_files()
        os._exit(sum(os.readlink(f"/proc/self/fd/{number}") == os.devnull for number in range(3)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_output_and_error_of_a_tool_are_escaped(capsys):
    def fail():
        print("out\x1b[2J")
        with escaped_output():
            print("twice\x1b")
        raise DataError("no \x1b[31mshard")

    assert exit_code(fail) == 3
    assert exit_code(lambda: None) == 0
    assert capsys.readouterr() == ("out\\x1b[2J\ntwice\\x1b\n", "error: no \\x1b[31mshard\n")


def test_a_terminal_is_raw_for_libraries_that_draw_on_it(capsys, monkeypatch):
    with escaped_output(), escaped_output():
        assert terminal() is sys.stdout
        monkeypatch.setattr(sys.stdout.raw, "isatty", lambda: True, raising=False)
        assert isinstance(sys.stdout, EscapedOutput)
        assert terminal() is sys.stdout.raw


@pytest.mark.parametrize("arguments", [["train", "no\x1b[31m.toml"], ["data", "inspect", "x\x1b[31m"]])
def test_names_in_errors_are_escaped(capsys, arguments):
    assert main(arguments) in (2, 3)
    out, error = capsys.readouterr()
    assert "\x1b" not in out + error
    assert "\\x1b[31m" in error


@pytest.mark.parametrize("arguments", [["\x1b[31m"], ["config", "--\x1b[31m"]])
def test_unknown_arguments_in_errors_are_escaped(capsys, arguments):
    with pytest.raises(SystemExit):
        main(arguments)
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\\x1b[31m" in error
