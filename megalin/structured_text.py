"""Limits on TOML, JSON, YAML and scripts from outside: depth, numbers, values. A small file must not stop a process."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 16 << 20
"""Largest config file."""
MAX_DEPTH = 100
"""Largest number of tables and lists around a value, and of parts of a dotted key."""
_MAX_VALUES = 10_000_000
"""Values of a document, where each alias of a YAML counts with all that it stands for."""
MAX_EXPANDED = 4 << 20
"""Characters that the variables of a script expand to."""
_MAX_YAML = 1 << 19  # characters; its parser takes some seconds for them
_MAX_BITS = 1024
_TOML_BITS = 64

_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
# tomllib takes quadratic time for a key of many parts. A part starts where no part character is before it.
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH}}}")
# YAML 1.1 reads 1:30:00 as a number of base 60, in quadratic time.
_LONG_SEXAGESIMAL = re.compile(r"[0-9_]++(?::[0-9]++){100}")


class StructureError(ValueError):
    """A document that is nested too deeply, expands too far or has a number that is too large."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError (tomllib.TOMLDecodeError, StructureError) with the problem."""
    if _LONG_KEY.search(text):
        raise StructureError(f"a dotted key has more than {MAX_DEPTH} parts")
    with structure_errors():
        values = tomllib.loads(text)
    _check(values, max_bits=_TOML_BITS)
    return values


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError (json.JSONDecodeError, UnicodeDecodeError, StructureError) with the problem."""
    with structure_errors():
        values = json.loads(text)
    _check(values, max_bits=_MAX_BITS)
    return values


def parse_yaml(text: str) -> Any:
    """Parses YAML without tags for Python objects. Raises ValueError with the problem."""
    import yaml  # takes a while, and few commands need it

    if len(text) > _MAX_YAML:
        raise StructureError(f"more than {_MAX_YAML:,} characters")
    if _LONG_SEXAGESIMAL.search(text):
        raise StructureError(f"an integer beyond {_MAX_BITS} bits")
    try:
        with structure_errors():
            values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise StructureError(" ".join(str(error).split())) from None
    _check(values, max_bits=_MAX_BITS)
    return values


@contextlib.contextmanager
def structure_errors() -> Iterator[None]:
    """Raises StructureError for limits of the interpreter that a parser meets."""
    try:
        yield
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise StructureError(f"an integer of more than {sys.get_int_max_str_digits():,} digits") from None


def _too_deep() -> StructureError:
    return StructureError(f"nested more than {MAX_DEPTH} deep")


def _check(values: Any, *, max_bits: int) -> None:
    """Walks through all values without recursion. Raises StructureError."""
    level, count = [values], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list | tuple | set):
                below.extend(value)
            elif type(value) is int and not -(1 << max_bits - 1) <= value < 1 << max_bits - 1:
                raise StructureError(f"an integer beyond {max_bits} bits ({value.bit_length()} bits)")
            if count + len(below) > _MAX_VALUES:
                raise StructureError(f"expands to more than {_MAX_VALUES:,} values")
        count += len(below)
        if not below:
            return
        level = below
    raise _too_deep()
