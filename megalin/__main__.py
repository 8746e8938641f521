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
from megalin.errors import MegalinError
from megalin.launch import adopt_launcher
from megalin.terminal_output import ClosedOutputError, discard_output, escaped_output, flush_output

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
            code = _command(arguments)
            flush_output()
            return code
        except MegalinError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":  # a terminal interrupts all ranks of a host
                print(_INTERRUPTED_TEXT, file=sys.stderr)
            return INTERRUPTED
        except ClosedOutputError:
            discard_output()
            return PIPE_CLOSED


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
    with EarlySigterm() if parsed.command.is_preemptible else nullcontext():
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.command.adopts_launcher:
        adopt_launcher()
    with prepared_outputs(parsed):
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
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # their reader has ended
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
