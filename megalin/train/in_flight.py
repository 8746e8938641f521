"""In-flight steps: a step's result is read once the next step has been launched, so the GPU never waits for the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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


class FinishedStep(NamedTuple):
    """A step with its result."""

    launched: InFlightStep
    result: StepResult

    @property
    def step(self) -> int:
        """Finished steps, this one included."""
        return self.launched.step


class InFlightSteps:
    """Queue of launched steps: each is finished in order, at most one step after its launch."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()

    def push(self, step: InFlightStep) -> None:
        """Adds the step that was launched last."""
        self._steps.append(step)
        assert len(self._steps) <= 2, self._steps

    def finished(self, *, drain: bool) -> Iterator[FinishedStep]:
        """Yields the steps that are to be finished now, in order, each after waiting for its result: all but the last
        one, and that one too if its result is on the host already or with `drain`.

        Raises:
            NumericError: as `PendingStep.wait` does.
        """
        while self._steps and (drain or len(self._steps) > 1 or self._steps[0].pending.is_ready):
            step = self._steps.popleft()
            yield FinishedStep(step, step.pending.wait())
