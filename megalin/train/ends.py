"""When a step ends: on a GPU once the next one was started, so that it has work while the host reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from megalin.train.step import PendingStep, StepResult


class Running(NamedTuple):
    """A step that was started, and what will be told of it beside its result."""

    step: int
    """Finished steps, with it."""
    started: PendingStep
    learning_rate: float
    data_wait_seconds: float
    digest: Tensor
    """Of its samples, for the ledger."""


class Ends:
    """Ends steps in their order, one at most behind the last that was started.

    Args:
        end: records the result of a step, with what is due after it.
    """

    def __init__(self, end: Callable[[Running, StepResult], None]) -> None:
        self._end = end
        self._running: Running | None = None
        self.result: StepResult | None = None
        """Of the last step that ended."""

    def follow(self, running: Running) -> None:
        """What was started last; the step before has ended."""
        assert self._running is None, self._running
        self._running = running

    def settle(self) -> None:
        """Ends the step that runs, if one does.

        Raises:
            NumericError: as `PendingStep.wait` does.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        self.result = running.started.wait()
        self._end(running, self.result)
