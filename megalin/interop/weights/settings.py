"""Typed access to the config.json of an external folder; errors name the key, its value and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalin.errors import CheckpointError

MAX_SIZE = 1 << 24
"""Upper limit of a model's sizes, so that no number of elements overflows."""
MAX_RATIO = 1024.0
"""Upper limit of the ratio of two widths."""


class Settings:
    """Keys of one JSON object. A key that is absent or null has the default of its class."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """`source` names the object in messages."""
        self.values, self.source = values, source

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer of at most 2^24. Raises CheckpointError."""
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise self.problem(key, f"must be a positive integer of at most {MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None, *, maximum: float = 1e12) -> float:
        """A positive number. Raises CheckpointError."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0.0 < value <= maximum:
            raise self.problem(key, f"must be a positive number of at most {maximum:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean. Raises CheckpointError."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.problem(key, "must be true or false")
        return value

    def table(self, key: str) -> Settings:
        """A nested object, empty if it is absent. Raises CheckpointError."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.problem(key, "must be an object")
        return Settings(value, f"{self.source}: {key}")

    def has(self, key: str) -> bool:
        """True if the key has a value."""
        return self.values.get(key) is not None

    def problem(self, key: str, rule: str) -> CheckpointError:
        """The error for a value that breaks a rule."""
        return CheckpointError(f"{self.source}: {key} = {repr(self.values.get(key))[:200]}: {rule}")

    def check_fixed(self, fixed: Mapping[str, tuple[Any, ...]], title: str) -> None:
        """Raises CheckpointError with every key whose value our mixers do not support."""
        problems = [
            f"{key} = {repr(self.values[key])[:200]}; supported: {' or '.join(map(repr, accepted))}"
            for key, accepted in fixed.items()
            if self.has(key) and not any(_same(self.values[key], value) for value in accepted)
        ]
        if problems:
            raise CheckpointError(f"{self.source}: unsupported variant of {title}:\n  " + "\n  ".join(problems))

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _same(value: Any, accepted: Any) -> bool:
    # The types must match too: 1 == True.
    return type(value) is type(accepted) and bool(value == accepted)
