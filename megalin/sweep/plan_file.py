"""Plan of a sweep or a ladder, kept in its folder from the first start on, and what differs in the files of a later
one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalin.errors import ConfigError

_MOST_CHANGES = 8


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], source: Path, what: str, remedy: str) -> None:
    """Raises ConfigError, naming the values that differ, where the files of `source` are not those of the plan.

    Args:
        what: begun with the plan, for the message.
        remedy: after "restore it".
    """
    known, found = dict(_leaves("", before)), dict(_leaves("", now))
    changes = [
        f"  {key}: {json.dumps(known.get(key))} before, {json.dumps(found.get(key))} now"
        for key in known | found
        if known.get(key) != found.get(key)
    ]
    if changes:
        more = [f"  and {len(changes) - _MOST_CHANGES} more"] if len(changes) > _MOST_CHANGES else []
        raise ConfigError(
            f"{source} changed after the {what} began; restore it, {remedy}:\n"
            + "\n".join([*changes[:_MOST_CHANGES], *more])
        )


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, value
