"""The learning rate as a pure function of the step: warmup, then cosine, warmup-stable-decay or constant."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from megalin.config import Config
from megalin.errors import ConfigError
from megalin.optim.adamw import OptimizerConfig


class ScheduleConfig(Config):
    """Shape of the learning rate over a run; the peak is `OptimizerConfig.lr`."""

    type: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: half a cosine to the minimum, constant with a linear decay at the end, or constant."""

    warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Steps over which the learning rate grows linearly to its peak; 0 starts at the peak."""

    decay_steps: int | None = pydantic.Field(default=None, ge=1)
    """Steps of the final linear decay of `wsd`; the other types have none."""

    min_lr_ratio: float = pydantic.Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Learning rate of the last step over the peak, for `cosine` and `wsd`."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        problems = []
        if self.type == "wsd" and self.decay_steps is None:
            problems.append(
                'decay_steps is missing, but type = "wsd" decays at the end; set it to about 10 % of the run'
            )
        if self.type != "wsd" and self.decay_steps is not None:
            problems.append(
                f'decay_steps = {self.decay_steps} is read by type = "wsd" only, not by "{self.type}"; remove it'
            )
        if self.type == "constant" and self.min_lr_ratio != 0.0:
            problems.append(f'min_lr_ratio = {self.min_lr_ratio} is not read by type = "constant"; remove it')
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def problems(self, total_steps: int) -> list[str]:
        """Reasons why this schedule does not fit a run of `total_steps`; empty if it fits."""
        decay_steps = self.decay_steps or 0
        if self.warmup_steps + decay_steps <= total_steps:
            return []
        steps = f"warmup_steps = {self.warmup_steps}"
        steps += f" plus decay_steps = {decay_steps} are" if decay_steps else " is"
        return [f"{steps} more than the {total_steps} steps of the run; shorten them or train longer"]


def learning_rate(optimizer: OptimizerConfig, schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate of the update with index `step` (0 is the first) of `total_steps`.

    With W = warmup_steps, N = total_steps, D = decay_steps, r = min_lr_ratio and s = step + 1 updates done after it:

        s <= W       lr * s / W
        constant     lr
        cosine       lr * (r + (1 - r) * (1 + cos(pi * (s - W) / (N - W))) / 2)
        wsd          lr * (1 - (1 - r) * max(0, s - (N - D)) / D)

    The warmup's last step has the peak and the run's last step exactly lr * r (unless constant); no step is lost on a
    rate of zero at the start.

    Raises:
        ConfigError: warmup and decay do not fit into `total_steps`.
    """
    assert 0 <= step < total_steps, f"step {step} is outside a run of {total_steps} steps"
    problems = schedule.problems(total_steps)
    if problems:
        raise ConfigError("\n".join(problems))
    done, warmup, min_ratio = step + 1, schedule.warmup_steps, schedule.min_lr_ratio
    if done <= warmup:
        return optimizer.lr * done / warmup
    if schedule.type == "cosine":
        if done == total_steps:
            return optimizer.lr * min_ratio
        cosine = math.cos(math.pi * (done - warmup) / (total_steps - warmup))
        return optimizer.lr * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + cosine))
    if schedule.type == "wsd":
        assert schedule.decay_steps is not None
        decayed = max(0, done - (total_steps - schedule.decay_steps)) / schedule.decay_steps
        return optimizer.lr * (1.0 - (1.0 - min_ratio) * decayed)
    return optimizer.lr
