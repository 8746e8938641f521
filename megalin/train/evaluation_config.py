"""The config of tasks that are evaluated during training."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pydantic

from megalin.config import SILENT, Change, Config


class EvaluationConfig(Config):
    """Choice tasks and generated tasks during training; the held-out loss has its keys in [train]."""

    on_change: ClassVar[Change | None] = "reported"
    tasks: list[str] = pydantic.Field(default=[])
    """Choice tasks and SUITE:TASK as `megalin eval --tasks` takes them, for example ["lambada", "recall:mqar"], and the
    suites recall, state-tracking and positions; empty: none."""
    every_steps: Annotated[int | None, SILENT] = pydantic.Field(default=None, ge=1)
    """Steps between evaluations of the tasks; left out: only after the last step."""
    limit: int | None = pydantic.Field(default=None, ge=1)
    """Questions or examples of each task, the first ones; left out: all."""
    data: Annotated[str, SILENT] = pydantic.Field(default="evaluation-data", min_length=1)
    """Folder of the tasks, which `megalin data get-evaluation-data` makes."""

    def problems(self) -> list[str]:
        """Keys without an effect."""
        values = {"every_steps": self.every_steps, "limit": self.limit}
        return [
            f"evaluation.{name} = {value} has no effect without evaluation.tasks; add tasks or leave it out"
            for name, value in values.items()
            if value is not None and not self.tasks
        ]
