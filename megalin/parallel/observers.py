"""Interface of an observer of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class CollectiveObserver(Protocol):
    """Observer of collectives on GPUs."""

    def collective(
        self, op: str, axis: str, shape: Sequence[int], *, waits: bool = False
    ) -> AbstractContextManager[None]:
        """Observes a collective for which the current CUDA stream, with `waits` the compute stream, waits in the
        body."""
