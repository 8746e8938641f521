"""The type of a command: its name, help, examples, arguments, and the module that runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple


class Output(Enum):
    """Kind of what a command writes at the path of an option."""

    FILE = auto()
    """A file; an existing one is replaced."""
    NEW_FILE = auto()
    """A file that must not exist."""
    PREFIX = auto()
    """Files whose names begin with the path."""
    FOLDER = auto()
    """A folder, which the command creates where it is missing."""


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        name: its name on the command line.
        help: one line about it.
        add_arguments: adds its arguments to a parser.
        module: the module under `megalin.commands` whose `run(arguments)` runs it and returns the exit code.
        examples: command lines, one a line, for the end of its help.
        adopts_launcher: whether its ranks meet through torch.distributed, whose variables the launcher's then set.
        is_preemptible: whether SIGTERM ends it with exit code 75 before it can save too.
        takes_mixers: whether it reads models, whose mixers of other packages --mixers lets it import.
        prints_result: whether what it prints is its result, so that it fails where standard output cannot be written;
            else its result is files, and it goes on.
        outputs: the kind of each output by its option (--NAME) or positional argument; `megalin.commands.outputs`
            checks them before the command runs.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    module: str
    examples: str
    adopts_launcher: bool = True
    is_preemptible: bool = False
    takes_mixers: bool = False
    prints_result: bool = True
    outputs: Mapping[str, Output] = MappingProxyType({})


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Adds --step N and --all-steps, of which `megalin.commands.base.steps_option` returns the choice."""
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--step", type=int, metavar="N", help="the checkpoint after N steps (the newest one)")
    steps.add_argument("--all-steps", action="store_true", help="every checkpoint")
