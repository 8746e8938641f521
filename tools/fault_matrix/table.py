"""The table of faults F01 to F72: their names, their injections, and those that wait for a later theme."""

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

_DRIFT = "drift, spikes, saves and stragglers"

LATER: dict[str, tuple[str, str]] = {
    "F21": ("flipped bit in a replica", _DRIFT),
}
"""Name and theme of the faults whose behaviour is not built yet; they are not injected."""


def fault(number: str, name: str) -> Callable[[Injection], Injection]:
    """Decorator that puts an injection into the table."""

    def add(inject: Injection) -> Injection:
        assert number not in FAULTS, number
        assert number not in LATER, number
        FAULTS[number] = FaultRow(name, inject)
        return inject

    return add
