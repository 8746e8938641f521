"""In-flight steps: a step's result is read once the next step has been launched, so the GPU never waits for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from megalin.train.step import PendingStep, StepResult


class InFlightStep(NamedTuple):
    """A launched step, and what is logged with its result."""

    step: int
    """Finished steps, this one included."""
    pending: PendingStep
    learning_rate: float
    data_wait_seconds: float
    digest: Tensor
    """Digest of its samples, for the ledger."""


class InFlightSteps:
    """Finishes steps in order, each at most one step after its launch.

    Args:
        on_finish: records the result of a step, evaluates and saves as configured.
    """

    def __init__(self, on_finish: Callable[[InFlightStep, StepResult], None]) -> None:
        self._on_finish = on_finish
        self._in_flight: InFlightStep | None = None
        self.result: StepResult | None = None
        """Result of the last finished step."""

    def add(self, step: InFlightStep) -> None:
        """Takes the step that was launched last; the one before is finished."""
        assert self._in_flight is None, self._in_flight
        self._in_flight = step

    def finish(self) -> None:
        """Waits for the step in flight, if there is one, and finishes it.

        Raises:
            NumericError: as `PendingStep.wait` does.
        """
        if self._in_flight is None:
            return
        step, self._in_flight = self._in_flight, None
        self.result = step.pending.wait()
        self._on_finish(step, self.result)
