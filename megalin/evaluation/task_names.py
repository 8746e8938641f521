"""Names of tasks: SUITE:TASK, wildcards, and the nearest name of one that does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from megalin.config import suggest
from megalin.errors import ConfigError


def split_name(name: str, suites: Sequence[str]) -> tuple[str | None, str]:
    """The suite and the pattern of SUITE:TASK; None and the whole name without a suite.

    Raises:
        ConfigError: a suite that is none of `suites`, with the nearest one; no task after the colon.
    """
    suite, colon, pattern = name.partition(":")
    if not colon:
        return None, name
    if suite not in suites:
        raise ConfigError(f"task {name!r}: {suite!r} is no suite with tasks; {suggest(suite, suites)}")
    if not pattern:
        raise ConfigError(f"task {name!r}: no task after the colon; use {suite}:TASK, or {suite}:* for all")
    return suite, pattern


def match_tasks(patterns: Sequence[str], known: Sequence[str], *, place: str = "the evaluation data") -> list[str]:
    """The known tasks that the patterns name, each once, in the order of the patterns.

    A pattern is a task; TASK for all its variants TASK/VARIANT; or has the wildcards * and ?, "*" alone for all.

    Args:
        place: where the tasks should be, for the message.

    Raises:
        ConfigError: a pattern that matches none, with the nearest name.
    """
    chosen: dict[str, None] = {}
    for pattern in patterns:
        of_variants = pattern if "/" in pattern else f"{pattern}/*"
        found = [task for task in known if pattern == "*" or fnmatchcase(task, of_variants if "/" in task else pattern)]
        if not found:
            names = list(known) if "/" in pattern else sorted({task.partition("/")[0] for task in known})
            raise ConfigError(f"task {pattern!r}: not in {place}; {suggest(pattern, names)}")
        chosen |= dict.fromkeys(found)
    return list(chosen)
