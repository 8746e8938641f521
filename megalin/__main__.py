"""The command line: python -m megalin COMMAND, for example train, plan or report (megalin/commands)."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys

from megalin.errors import MegalinError
from megalin.launch import adopt_launcher


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit code (errors.py). A MegalinError is printed without a traceback."""
    try:
        adopt_launcher()
        return _command(arguments)
    except MegalinError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _command(arguments: list[str] | None) -> int:
    from megalin.commands import COMMANDS  # imports torch: seconds that a bad launch need not wait for

    if not gc.isenabled():  # disabled by run() until torch is imported
        gc.freeze()
        gc.enable()
    parser = argparse.ArgumentParser(
        prog="megalin", description="Distributed pretraining of linear-complexity language models."
    )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed passes LOCAL_RANK as an option too
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.help))
    # argparse does not accept key=value arguments after an option; parse_known_args returns them in `rest`.
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (any(argument.startswith("-") for argument in rest) or not hasattr(parsed, "overrides")):
        hint = "; write keys of the config as parallel.tp=2" if hasattr(parsed, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    elif rest:
        parsed.overrides = [*parsed.overrides, *rest]
    # A tensor sharded over two axes is gathered by two all-gathers; torch warns of it at every checkpoint and report.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return COMMANDS[parsed.command].run(parsed)


def run() -> None:
    """Runs `main` as a process and exits without the interpreter's teardown, which now and then meets a thread of a
    destroyed process group and aborts a command that has succeeded."""
    gc.disable()  # the objects of imported modules stay; traversing them takes a fifth of a start
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
