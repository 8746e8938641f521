"""The command line: python -m megalin COMMAND, as train, plan or report (megalin/commands)."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys

from megalin.errors import MegalinError
from megalin.launch import adopt_launcher


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code (errors.py). A user's error is printed without a traceback."""
    try:
        adopt_launcher()
        return _command(arguments)
    except MegalinError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _command(arguments: list[str] | None) -> int:
    from megalin.commands import COMMANDS  # torch, which takes seconds and which a bad launch need not wait for

    if not gc.isenabled():  # run() leaves this to be done once torch is there
        gc.freeze()
        gc.enable()
    parser = argparse.ArgumentParser(
        prog="megalin", description="Distributed pretraining of linear-complexity language models."
    )
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed passes what LOCAL_RANK says as well
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.help))
    # argparse gives up on key=value arguments that follow an option; they are left over here.
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (any(argument.startswith("-") for argument in rest) or not hasattr(parsed, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    elif rest:
        parsed.overrides = [*parsed.overrides, *rest]
    # Gathering a tensor that two axes split takes two all-gathers; torch warns of it at every checkpoint and report.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return COMMANDS[parsed.command].run(parsed)


def run() -> None:
    """`main` as a process. It leaves without the interpreter's teardown, which now and then meets a thread of a process
    group that was destroyed and aborts a command that has done its work."""
    gc.disable()  # the objects of what is loaded stay; walking through them takes a fifth of a start
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
