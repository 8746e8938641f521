"""The learning rate as a pure function of the step: a linear warmup, then a constant rate or one of four decays."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from megalin.config import Config
from megalin.errors import ConfigError
from megalin.optim.adamw import OptimizerConfig


class ScheduleConfig(Config):
    """Shape of the learning rate over a run; the peak is `OptimizerConfig.lr`."""

    type: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """After the warmup: half a cosine or a line to the minimum at the last step (cosine, linear); constant with a
    linear decay at the end (wsd); proportional to one over the square root of the step (inverse_sqrt, as fairseq's and
    Megatron-LM's: lr * sqrt(warmup_steps / step)); or constant."""

    warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Steps over which the learning rate grows linearly to its peak; 0 starts at the peak. `inverse_sqrt` needs at
    least 1."""

    warmup_start_ratio: float = pydantic.Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Learning rate from which the warmup grows, over the peak: fairseq's --warmup-init-lr over --lr."""

    decay_steps: int | None = pydantic.Field(default=None, ge=1)
    """Steps of the final linear decay of `wsd`; the other types have none."""

    min_lr_ratio: float = pydantic.Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Learning rate of the last step over the peak, for `cosine`, `linear` and `wsd`; the lowest one for
    `inverse_sqrt`."""

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
        if self.type == "inverse_sqrt" and self.warmup_steps == 0:
            problems.append(
                'warmup_steps = 0, but type = "inverse_sqrt" decays from the end of its warmup; use at least 1'
            )
        elif self.warmup_steps == 0 and self.warmup_start_ratio != 0.0:
            problems.append(
                f"warmup_start_ratio = {self.warmup_start_ratio} is not read without a warmup; set warmup_steps, or "
                "remove it"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def problems(self, total_steps: int) -> list[str]:
        """Reasons why this schedule does not fit a run of `total_steps`, with overrides that make it fit; empty if it
        fits."""
        warmup, decay = self.warmup_steps, self.decay_steps or 0
        needed = warmup + decay
        if needed <= total_steps:
            return []
        names, shorter_decay, overrides = f"warmup_steps = {warmup} is", 0, ""
        if decay:
            names = f"warmup_steps = {warmup} plus decay_steps = {decay} are"
            shorter_decay = max(1, total_steps * decay // needed)
            overrides = f" schedule.decay_steps={shorter_decay}"
        overrides = f"schedule.warmup_steps={min(warmup, total_steps - shorter_decay)}{overrides}"
        return [f"{names} more than the {total_steps} steps of the run; use {overrides}, or train.steps={needed}"]


def learning_rate(optimizer: OptimizerConfig, schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate of the update with index `step` (0 is the first) of `total_steps`.

    With W = warmup_steps, w = warmup_start_ratio, N = total_steps, D = decay_steps, r = min_lr_ratio and s = step + 1
    updates done after it:

        s <= W          lr * (w + (1 - w) * s / W)
        constant        lr
        cosine          lr * (r + (1 - r) * (1 + cos(pi * (s - W) / (N - W))) / 2)
        linear          lr * (1 - (1 - r) * (s - W) / (N - W))
        wsd             lr * (1 - (1 - r) * max(0, s - (N - D)) / D)
        inverse_sqrt    lr * max(r, sqrt(W / s))

    The warmup's last step has the peak; no step is lost on a rate of zero at the start. The last step of a run with
    cosine, linear or wsd has exactly lr * r, unless it belongs to the warmup.

    inverse_sqrt and the warmup are those of fairseq's `inverse_sqrt` at s updates, with lr * w as its
    --warmup-init-lr; fairseq uses the rate of s updates for the update after them, one step later. r is Megatron-LM's
    --min-lr over --lr; fairseq has r = 0.

    Raises:
        ConfigError: warmup and decay do not fit into `total_steps`.
    """
    assert 0 <= step < total_steps, f"step {step} is outside a run of {total_steps} steps"
    problems = schedule.problems(total_steps)
    if problems:
        raise ConfigError("\n".join(problems))
    peak, done, warmup = optimizer.lr, step + 1, schedule.warmup_steps
    if done < warmup:
        start = peak * schedule.warmup_start_ratio
        return start + (peak - start) * done / warmup
    if done == warmup or schedule.type == "constant":
        return peak
    return peak * _decayed_ratio(schedule, done, total_steps)


def _decayed_ratio(schedule: ScheduleConfig, done: int, total_steps: int) -> float:
    """Learning rate over the peak after the warmup, for the types that decay."""
    warmup, min_ratio = schedule.warmup_steps, schedule.min_lr_ratio
    if schedule.type == "inverse_sqrt":
        return max(min_ratio, math.sqrt(warmup / done))
    if done == total_steps:
        return min_ratio
    if schedule.type == "cosine":
        cosine = math.cos(math.pi * (done - warmup) / (total_steps - warmup))
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + cosine)
    decay_steps = schedule.decay_steps or total_steps - warmup  # linear decays over all steps after the warmup
    return 1.0 - (1.0 - min_ratio) * max(0, done - (total_steps - decay_steps)) / decay_steps
