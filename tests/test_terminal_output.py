"""Escaped output: control characters of names and messages reach neither a terminal nor a log."""

import logging
import os
import sys

import pytest

from megalin.__main__ import PIPE_CLOSED, main
from megalin.errors import DataError
from megalin.terminal_output import EscapedOutput, escape_controls, escaped_output, exit_code, terminal


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
