"""config.json of an outside folder as typed values; a value of another kind is named with the rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalin.errors import CheckpointError

MOST = 1 << 24
"""No size of a model is larger, so that no number of elements overflows."""
MOST_RATIO = 1024.0
"""No width is more times another."""


class Settings:
    """The keys of one JSON object. A key that is absent, or null, has the default of its class."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """`source` names the object in messages."""
        self.values, self.source = values, source

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer of at most 2^24. Raises CheckpointError."""
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= MOST:
            raise self.problem(key, f"a positive integer is needed here, at most {MOST}")
        return value

    def number(self, key: str, default: float | None = None, *, most: float = 1e12) -> float:
        """A positive number. Raises CheckpointError."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0.0 < value <= most:
            raise self.problem(key, f"a positive number is needed here, at most {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false. Raises CheckpointError."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.problem(key, "true or false is needed here")
        return value

    def table(self, key: str) -> Settings:
        """A nested object, empty where it is absent. Raises CheckpointError."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.problem(key, "an object is needed here")
        return Settings(value, f"{self.source}: {key}")

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.values.get(key) is not None

    def problem(self, key: str, rule: str) -> CheckpointError:
        """The error that says that a key's value breaks a rule."""
        return CheckpointError(f"{self.source}: {key} = {repr(self.values.get(key))[:200]}: {rule}")

    def check_fixed(self, fixed: Mapping[str, tuple[Any, ...]], title: str) -> None:
        """Raises CheckpointError naming every key whose value means something that our mixers do not compute."""
        problems = [
            f"{key} = {repr(self.values[key])[:200]}; supported: {' or '.join(map(repr, accepted))}"
            for key, accepted in fixed.items()
            if self.has(key) and not any(_same(self.values[key], value) for value in accepted)
        ]
        if problems:
            raise CheckpointError(f"{self.source}: a {title} that is not supported:\n  " + "\n  ".join(problems))

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _same(value: Any, accepted: Any) -> bool:
    # 1 == True, but a number where a flag belongs is another file.
    return type(value) is type(accepted) and bool(value == accepted)
