"""The tables [optimizer] and [schedule] of a run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import pydantic

from megalin.config import SILENT, Change, Config

_Beta = Annotated[float, pydantic.Field(ge=0.0, lt=1.0, allow_inf_nan=False)]


class OptimizerConfig(Config):
    """AdamW: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= lr (m^ / (sqrt(v^) + eps) + weight_decay w)."""

    on_change: ClassVar[Change | None] = "reported"
    lr: float = pydantic.Field(gt=0.0, allow_inf_nan=False)
    """Peak learning rate; the schedule scales it."""

    betas: list[_Beta] = pydantic.Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay per step of the first and the second moment."""

    eps: float = pydantic.Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    """Added to the square root of the second moment."""

    weight_decay: float = pydantic.Field(default=0.1, ge=0.0, allow_inf_nan=False)
    """Decoupled decay per step and unit of learning rate; norm weights, biases and the like do not decay."""

    max_grad_norm: float | None = pydantic.Field(default=None, gt=0.0, allow_inf_nan=False)
    """Largest global gradient norm: gradients above it are scaled down to it; absent: no clipping."""


class ScheduleConfig(Config):
    """Shape of the learning rate over a run; the peak is `OptimizerConfig.lr`."""

    on_change: ClassVar[Change | None] = "reported"
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

    allow_jump: Annotated[bool, SILENT] = False
    """Lets a run that resumes go on with another fraction of the peak than its last step had, as where a cosine is
    prolonged; without it such a change is refused."""

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
