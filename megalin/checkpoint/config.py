"""The config of a run's checkpoints: after which steps, and how many stay."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from megalin.config import Change, Config


class CheckpointConfig(Config):
    """Checkpoints of a run."""

    on_change: ClassVar[Change | None] = "silent"
    every_steps: int | None = pydantic.Field(default=None, ge=1)
    """Steps between checkpoints; left out: only after the last step and `keep_steps`."""
    background: bool = False
    """Training waits for a copy of the state only, in host memory of each rank (as large as the state that the rank
    stores), and goes on while a thread writes, verifies and publishes the checkpoint. One save is in flight: the next
    one waits for it. The run waits for the checkpoint of its last step, and before it ends by SIGTERM or an error."""
    keep_latest: int | None = pydantic.Field(default=None, ge=1)
    """Number of newest valid checkpoints to keep besides those of `keep_steps`; left out: all. Before an older one is
    removed, the files of those that stay are verified, once each. With train.on_spike = "rollback" the newest one of
    `every_steps` stays too, to which a spike would roll back."""
    keep_steps: list[int] = pydantic.Field(default=[])
    """Steps whose checkpoints are saved and stay, from which other runs branch (train.branch_from)."""

    def is_scheduled(self, step: int) -> bool:
        """Whether a checkpoint is saved after the step wherever the run ends."""
        return step in self.keep_steps or (self.every_steps is not None and step % self.every_steps == 0)

    def problems(self, total_steps: int) -> list[str]:
        """Steps outside a run of `total_steps`, and saves in the background of a run that has none there."""
        idle = self.background and self.every_steps is None and all(step == total_steps for step in self.keep_steps)
        problems = [
            "checkpoint.background = true without every_steps or keep_steps: the only checkpoint is that of the last "
            "step, for which the run waits; set checkpoint.every_steps, or leave background out"
        ]
        return (problems if idle else []) + [
            f"checkpoint.keep_steps = {self.keep_steps}: {step} is no step of a run of {total_steps}; remove it, or "
            "change train.steps"
            for step in self.keep_steps
            if not 1 <= step <= total_steps
        ]
