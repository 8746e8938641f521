"""The config of a run's checkpoints: after which steps, and how many stay."""

from __future__ import annotations

import pydantic

from megalin.config import Config


class CheckpointConfig(Config):
    """Checkpoints of a run."""

    every_steps: int | None = pydantic.Field(default=None, ge=1)
    """Steps between checkpoints; left out: only after the last step and `keep_steps`."""
    keep_latest: int | None = pydantic.Field(default=None, ge=1)
    """Number of newest valid checkpoints to keep besides those of `keep_steps`; left out: all. Before an older one is
    removed, the files of those that stay are verified, once each."""
    keep_steps: list[int] = pydantic.Field(default=[])
    """Steps whose checkpoints are saved and stay, from which other runs branch (train.branch_from)."""

    def problems(self, total_steps: int) -> list[str]:
        """Steps outside a run of `total_steps`."""
        return [
            f"checkpoint.keep_steps = {self.keep_steps}: {step} is no step of a run of {total_steps}; remove it, or "
            "change train.steps"
            for step in self.keep_steps
            if not 1 <= step <= total_steps
        ]
