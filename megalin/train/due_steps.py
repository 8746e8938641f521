"""Steps of a run after which it evaluates or saves, or which must be finished before the next one starts."""

from __future__ import annotations

from typing import NamedTuple

from megalin.train.config import RunConfig


class DueSteps(NamedTuple):
    """The steps of a run's process after which something is due."""

    config: RunConfig
    resumed_step: int
    """Finished steps at its start."""
    last_step: int
    has_validation: bool
    has_tasks: bool

    def is_first(self, step: int) -> bool:
        """Whether the step is the first one of this process."""
        return step == self.resumed_step + 1

    def has_any(self, step: int) -> bool:
        """Whether the step must be finished before the next one starts: it is logged first or last, evaluated or
        checkpointed."""
        return self.is_first(step) or self.save(step) or self.evaluation(step) or self.tasks(step)

    def evaluation(self, step: int) -> bool:
        """Whether the validation split is evaluated after the step."""
        return self.has_validation and self._is_last_or(self.config.train.evaluate_every_steps, step)

    def tasks(self, step: int) -> bool:
        """Whether `evaluation.tasks` are evaluated after the step."""
        return self.has_tasks and self._is_last_or(self.config.evaluation.every_steps, step)

    def save(self, step: int) -> bool:
        """Whether a checkpoint is saved after the step."""
        return step == self.last_step or self.config.checkpoint.is_scheduled(step)

    def comparison(self, step: int) -> bool:
        """Whether the ranks compare their copies of weights and moments after the step."""
        every_steps = self.config.train.compare_replicas_every_steps
        return every_steps > 0 and (self.save(step) or step % every_steps == 0)

    def _is_last_or(self, every_steps: int | None, step: int) -> bool:
        return step == self.last_step or (every_steps is not None and step % every_steps == 0)
