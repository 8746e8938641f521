"""`megalin completion`: the script with which a shell completes commands, options and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from megalin.commands.arguments.parser import build_parser

_FILES = ("config", "model", "prefix", "source", "--input", "--output-prefix", "--tokenizer-model", "--prompts")
"""Arguments that name files without the type Path, since they may name something else."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    parser = build_parser()
    for action in _actions(parser):
        if action.type is Path or {action.dest, *action.option_strings} & {*_FILES}:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of all commands, which shtab then completes too: it passes over arguments without a help text."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = "command"
            for command in dict.fromkeys(action.choices.values()):
                yield from _actions(command)
        else:
            yield action
