"""The learning rate as a pure function of the step: a linear warmup, then a constant rate or one of four decays."""

from __future__ import annotations

import math

from megalin.errors import ConfigError
from megalin.optim.config import OptimizerConfig, ScheduleConfig


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
