"""Arguments of the command that serves the shell: completion."""

from __future__ import annotations

import argparse

from megalin.commands.arguments.command import Command


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


COMPLETION = Command(
    "completion",
    "print the script with which a shell completes commands, options and files",
    _completion,
    "completion",
    """\
megalin completion bash > ~/.local/share/bash-completion/completions/megalin
megalin completion zsh > ~/.zfunc/_megalin""",
    adopts_launcher=False,
)
