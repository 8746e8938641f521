"""The table of faults F01 to F72: their names and their injections."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fault_matrix.lab import Lab

Injection = Callable[[Lab], None]


class FaultRow(NamedTuple):
    """A row of the matrix."""

    name: str
    inject: Injection


FAULTS: dict[str, FaultRow] = {}
"""Injections by id, filled by `fault`."""


def fault(number: str, name: str) -> Callable[[Injection], Injection]:
    """Decorator that puts an injection into the table."""

    def add(inject: Injection) -> Injection:
        assert number not in FAULTS, number
        FAULTS[number] = FaultRow(name, inject)
        return inject

    return add
