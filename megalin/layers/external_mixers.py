"""Mixers of other packages: their modules run code, so only the user's own words import them, never a run's files."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megalin.errors import ConfigError

VARIABLE = "MEGALIN_MIXERS"
"""Environment variable with packages of mixers, separated by commas; --mixers adds to it while a command runs."""


def external_types(values: Any) -> Iterator[str]:
    """Yields each dotted `type` of nested tables and lists: the modules of other packages that a config names."""
    if isinstance(values, Mapping):
        if isinstance(name := values.get("type"), str) and "." in name:
            yield name
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from external_types(value)


def external_module(name: str, mixers: Collection[str] = ()) -> ModuleType:
    """The module of another package that a mixer's `type` names.

    One that this process has imported is returned. Another one is imported if `mixers` or MEGALIN_MIXERS has its
    package, or the module itself; the current folder then joins the end of the search path.

    Args:
        mixers: the modules that the user's own config names, and packages.

    Raises:
        ConfigError: the user named no such package, or there is no such module.
    """
    if not _is_module_name(name):
        raise ConfigError(f"type = {name!r}: not the dotted name of a module; write it as in import")
    if (imported := sys.modules.get(name)) is not None:
        return imported
    if not any(name == each or name.startswith(f"{each}.") for each in (*mixers, *_packages_of_environment())):
        package = name.partition(".")[0]
        raise ConfigError(
            f"type = {name!r}: a mixer of another package, whose code no file of a run imports by itself; if you trust "
            f"that package, name it: --mixers {package}, {VARIABLE}={package}, or in a program import it first"
        )
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"type = {name!r}: {error}; give a module that can be imported") from None


def _packages_of_environment() -> list[str]:
    """The packages of MEGALIN_MIXERS. Raises ConfigError for one that is no name."""
    packages = [each.strip() for each in os.environ.get(VARIABLE, "").split(",") if each.strip()]
    for package in packages:
        if not _is_module_name(package):
            raise ConfigError(f"--mixers or {VARIABLE}: {package!r} is no name of a package; write it as in import")
    return packages


def _is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


@contextmanager
def imported_mixers(packages: Sequence[str]) -> Iterator[None]:
    """Context manager that adds packages to MEGALIN_MIXERS, of this process and of those that it starts."""
    before = os.environ.get(VARIABLE)
    try:
        if packages:
            os.environ[VARIABLE] = ",".join([*packages, *([before] if before else [])])
            _packages_of_environment()
        yield
    finally:
        if packages:
            os.environ.pop(VARIABLE)
            os.environ.update({} if before is None else {VARIABLE: before})
