"""The command line: megalin COMMAND or python -m megalin COMMAND, for example train, plan or report."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress

from megalin.commands.arguments.parser import build_parser
from megalin.commands.early_sigterm import EarlySigterm
from megalin.commands.outputs import prepared_outputs
from megalin.errors import MegalinError, StorageError
from megalin.launch import adopt_launcher
from megalin.layers.external_mixers import imported_mixers
from megalin.terminal_output import (
    ClosedOutputError,
    OutputError,
    describe_lost,
    escaped_output,
    finish_output,
    open_standard_files,
    set_best_effort,
)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of shells: 128 + SIGINT."""
PIPE_CLOSED = 141
"""Exit code where the reader of standard output has ended, as `head` does: 128 + SIGPIPE."""
_INTERRUPTED_TEXT = (
    "interrupted; the same command continues a run from its newest checkpoint, and with --resume the work on a corpus"
)
SPIN_COUNT = "1000"
"""Iterations for which an idle OpenMP thread spins before it sleeps: libgomp's own number for more threads than cores.
By default it is 300,000, and steps on a CPU take up to 20 times as long where other programs use the cores."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code (errors.py; 130 after Ctrl-C; 141 without a reader of its output). A
    MegalinError is printed without a traceback; control characters of whatever is printed are escaped."""
    with escaped_output():
        try:
            return _finished(_exit_code(arguments))
        except SystemExit as error:  # argparse's, after a help or an error
            raise SystemExit(_finished(error.code if isinstance(error.code, int) else 0)) from None


def _exit_code(arguments: list[str] | None) -> int:
    """The exit code of a command, whose error is printed."""
    try:
        return _command(arguments)
    except MegalinError as error:
        print(error.line(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # a terminal interrupts all ranks of a host
            print(_INTERRUPTED_TEXT, file=sys.stderr)
        return INTERRUPTED
    except OutputError as error:
        return _lost(error)


def _finished(code: int) -> int:
    """Writes the rest of the output; returns the exit code, that of lost output in place of 0."""
    try:
        finish_output()
    except OutputError as error:
        return code or _lost(error)
    return code


def _lost(error: OutputError) -> int:
    if isinstance(error, ClosedOutputError):
        return PIPE_CLOSED
    print(f"StorageError: {describe_lost(error)}", file=sys.stderr)
    return StorageError.exit_code


def _command(arguments: list[str] | None) -> int:
    parser = build_parser()
    # argparse does not accept key=value arguments after an option; parse_known_args returns them in `rest`.
    parsed, rest = parser.parse_known_args(arguments)
    if parsed.command is None:
        if rest:
            parsed.overview.error(f"unrecognized arguments: {' '.join(rest)}")
        parsed.overview.print_help()
        return 0
    if rest and (any(argument.startswith("-") for argument in rest) or not hasattr(parsed, "overrides")):
        hint = "; write keys of the config as parallel.tp=2" if hasattr(parsed, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    elif rest:
        parsed.overrides = [*parsed.overrides, *rest]
    if not parsed.command.prints_result:
        set_best_effort()
    with EarlySigterm() if parsed.command.is_preemptible else nullcontext():
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.command.adopts_launcher:
        adopt_launcher()
    with prepared_outputs(parsed), imported_mixers(getattr(parsed, "mixers", [])):
        command = importlib.import_module(f"megalin.commands.{parsed.command.module}")  # most import torch, for seconds
        if not gc.isenabled():  # disabled by run() until the modules are imported
            gc.freeze()
            gc.enable()
        # A tensor sharded over two axes is gathered by two all-gathers; torch warns of it at every checkpoint.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        return int(command.run(parsed))


def data_command(name: str) -> Callable[[list[str] | None], int]:
    """The main function of a file in tools/ that runs `megalin data NAME`."""

    def run_command(arguments: list[str] | None = None) -> int:
        return main(["data", name, *(sys.argv[1:] if arguments is None else arguments)])

    return run_command


def run() -> None:
    """Runs `main` as a process and exits without the interpreter's teardown, which now and then meets a thread of a
    destroyed process group and aborts a command that has succeeded."""
    gc.disable()  # the objects of imported modules stay; traversing them takes a fifth of a start
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    open_standard_files()
    code = main()
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.flush()  # an error that `main` has printed at its end; standard output it has flushed
    os._exit(code)


if __name__ == "__main__":
    run()
