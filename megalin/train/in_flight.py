"""In-flight steps: a step's result is read once the next step has been launched, so the GPU never waits for the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from torch import Tensor

from megalin.errors import NumericError
from megalin.train.replicas import PendingComparison
from megalin.train.step import PendingStep, StepResult
from megalin.train.stragglers import SlowestRank


class InFlightStep(NamedTuple):
    """A launched step, and what is logged with its result."""

    step: int
    """Finished steps, this one included."""
    pending: PendingStep
    learning_rate: float
    data_wait_seconds: float
    """Of the rank that waited longest."""
    data_wait_rank: int
    slowest: SlowestRank | None
    """The slowest rank of the steps before; None where it is not known."""
    digest: Tensor
    """Digest of its samples, for the ledger."""
    comparison: PendingComparison | None
    """Of the copies after it, where it is due."""
    batch: int
    """Number of its batch in the sample order."""


class FinishedStep(NamedTuple):
    """A step with its result."""

    launched: InFlightStep
    result: StepResult

    @property
    def step(self) -> int:
        """Finished steps, this one included."""
        return self.launched.step


@contextmanager
def naming_samples(step: int, describe_samples: Callable[[int], str]) -> Iterator[None]:
    """Adds the samples of the step to a NumericError of the body."""
    try:
        yield
    except NumericError as error:
        raise NumericError(
            f"{error}. Samples of step {step}, by data-parallel rank: {describe_samples(step)}"
        ) from error


class InFlightSteps:
    """Queue of launched steps: each is finished in order, at most one step after its launch."""

    def __init__(self, describe_samples: Callable[[int], str]) -> None:
        """`describe_samples` names the samples of a step, for the message of one that is not finite."""
        self._describe_samples = describe_samples
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
            ReplicaError: as `PendingComparison.wait` does.
        """
        while self._steps and (drain or len(self._steps) > 1 or self._steps[0].pending.is_ready):
            step = self._steps.popleft()
            with naming_samples(step.step, self._describe_samples):
                result = step.pending.wait()
            if step.comparison is not None:
                step.comparison.wait()
            yield FinishedStep(step, result)

    def drop(self) -> None:
        """Waits for the launched steps and discards their results: a rollback undoes them, whatever they are."""
        while self._steps:
            with suppress(NumericError):
                self._steps.popleft().pending.wait()
