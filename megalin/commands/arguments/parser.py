"""The parser of the command line, with its commands in groups."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from megalin import __version__
from megalin.commands.arguments.command import Command
from megalin.commands.arguments.groups import DATA, DATA_HELP, GROUPS
from megalin.layers.external_mixers import VARIABLE

_EXAMPLES = """\
megalin params
megalin train run.toml --folder runs/mine
megalin eval runs/mine"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. It sets `command` to the chosen Command, or `overview` to the parser whose help
    lists the commands to choose from."""
    first, *others = GROUPS.items()
    listed = {"data": DATA_HELP}
    groups = {first[0]: _lines(first[1]), "data": listed, **{title: _lines(group) for title, group in others}}
    parser = argparse.ArgumentParser(
        prog="megalin",
        usage="megalin [-h] [--version] COMMAND ...",
        description="Distributed pretraining of linear-complexity language models.\n\n" + _overview(groups),
        epilog=_epilog(_EXAMPLES) + "\n\nmegalin COMMAND --help describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megalin {__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed passes LOCAL_RANK as an option too
    parser.set_defaults(command=None, overview=parser)
    commands = parser.add_subparsers(prog="megalin", metavar="COMMAND", help=argparse.SUPPRESS)
    data_groups = {title: _lines(group) for title, group in DATA.items()}
    data = commands.add_parser(
        "data",
        help=DATA_HELP,
        usage="megalin data [-h] COMMAND ...",
        description=f"{DATA_HELP[0].upper()}{DATA_HELP[1:]}.\n\n" + _overview(data_groups),
        epilog="megalin data COMMAND --help describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data.set_defaults(overview=data)
    data_commands = data.add_subparsers(prog="megalin data", metavar="COMMAND", help=argparse.SUPPRESS)
    for subparsers, members in ((commands, GROUPS), (data_commands, DATA)):
        for command in (command for group in members.values() for command in group):
            _add(subparsers, command)
    return parser


def _add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    parser = subparsers.add_parser(
        command.name,
        help=command.help,
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        epilog=_epilog(command.examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    if command.takes_mixers:
        mixers = f"import mixers of this package that a run's files name (also {VARIABLE}); repeatable"
        parser.add_argument("--mixers", action="append", default=[], metavar="PACKAGE", help=mixers)
    for action in parser._actions:
        if action.nargs == argparse.ZERO_OR_MORE:
            action.required = False  # else argparse names it among arguments that are missing
    parser.set_defaults(command=command)


def _lines(group: Sequence[Command]) -> dict[str, str]:
    return {command.name: command.help for command in group}


def _overview(groups: Mapping[str, Mapping[str, str]]) -> str:
    """The commands under the titles of their groups."""
    width = max(len(name) for group in groups.values() for name in group) + 2
    texts = [
        "\n".join([f"{title}:", *(f"  {name:{width}}{text}" for name, text in group.items())])
        for title, group in groups.items()
    ]
    return "\n\n".join(texts)


def _epilog(examples: str) -> str:
    """Examples, indented up to the first empty line; the text below it as it stands."""
    commands, _, note = examples.partition("\n\n")
    indented = "\n".join(f"  {line}" for line in commands.splitlines())
    return f"examples:\n{indented}" + (f"\n\n{note}" if note else "")
