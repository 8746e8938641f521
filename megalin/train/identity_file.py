"""The file `identity.json` of a run folder: the values that decide the run's numbers, and the starts that changed
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pydantic

from megalin.config import Config
from megalin.errors import DataError
from megalin.files import read_input

IDENTITY_NAME = "identity.json"
_LIMIT_BYTES = 1 << 26
_LONGEST_VALUE = 80


class Segment(Config):
    """A start at which values changed that the steps after it have."""

    step: int = pydantic.Field(ge=0)
    """Finished steps then."""
    changes: dict[str, Annotated[list[Any], pydantic.Field(min_length=2, max_length=2)]]
    """The recorded and the new value by name."""

    def __str__(self) -> str:
        changes = (f"{name} {value_text(before)} -> {value_text(now)}" for name, (before, now) in self.changes.items())
        return f"changed since step {self.step}: {', '.join(changes)}"


class IdentityFile(Config):
    """Content of `identity.json`."""

    config: dict[str, Any]
    """The keys of the config under their dotted names, blocks written out."""
    inputs: dict[str, Any]
    """Program, mesh, device, tokenizer and validation split."""
    segments: list[Segment]
    """Starts at which values changed, in order."""


def read_identity(folder: Path) -> IdentityFile | None:
    """The identity of the run in `folder`; None of a run of an earlier version, which has no such file.

    Raises:
        DataError: it is not readable.
    """
    path = folder / IDENTITY_NAME
    if not path.exists():
        return None
    remedy = "restore it, or remove it: the next start of the run writes it again"
    try:
        return IdentityFile.model_validate(json.loads(read_input(path, limit_bytes=_LIMIT_BYTES, remedy=remedy)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not the identity of a run; {remedy}") from None


def value_text(value: Any) -> str:
    """A value for people, long ones cut; a sha256 by its first digits."""
    text = "not set" if value is None else value if isinstance(value, str) else json.dumps(value)
    if len(text) == 64 and not set(text) - set("0123456789abcdef"):
        return f"sha256 {text[:12]}..."
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
