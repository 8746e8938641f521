"""Outputs that a command's options name: checked before its work."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megalin.commands.arguments.command import Output
from megalin.errors import ConfigError, StorageError
from megalin.files import storage_errors
from megalin.launch import launched


@contextmanager
def prepared_outputs(parsed: argparse.Namespace) -> Iterator[None]:
    """Checks all outputs that the options of the parsed command name, and creates the missing folders of files; those
    that are still empty at the end are removed. Every rank checks, the first creates.

    Raises:
        ConfigError: a file that exists and is not replaced.
        StorageError: an output that cannot be written.
    """
    created: list[Path] = []
    try:
        for option, kind in parsed.command.outputs.items():
            value = getattr(parsed, option.lstrip("-").replace("-", "_"))
            if value is not None:
                check_output(option, str(value), kind)
                if kind is not Output.FOLDER and (not parsed.command.adopts_launcher or launched().rank == 0):
                    created += _make_folders(_folder(str(value), kind))
        yield
    finally:
        for folder in reversed(created):
            with suppress(OSError):  # it has files
                folder.rmdir()


def check_output(option: str, name: str, kind: Output) -> None:
    """Checks one output; creates nothing. `option`: its option or argument, for the message. Raises as
    `prepared_outputs`."""
    path, output = Path(name), f"{option} {name}"
    if kind is Output.NEW_FILE and os.path.lexists(path):
        raise ConfigError(f"{output}: exists already; remove it or give another name")
    if kind is Output.FILE and path.is_dir():
        raise StorageError(f"{output}: is a folder; give the name of a file")
    folder = _folder(name, kind)
    nearest = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), Path("."))
    if not nearest.is_dir():
        raise StorageError(f"{output}: {nearest} is not a folder; give another path")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise StorageError(
            f"{output}: the folder {nearest} cannot be written; fix its permissions, or give another path"
        )


def _folder(name: str, kind: Output) -> Path:
    """The folder that gets the files."""
    if kind is Output.FOLDER:
        return Path(name)
    return Path(f"{name}x" if kind is Output.PREFIX else name).parent  # "shards/" is a prefix in the folder shards


def _make_folders(folder: Path) -> list[Path]:
    """Creates the folder and those above it; those that were missing, from the top."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]
