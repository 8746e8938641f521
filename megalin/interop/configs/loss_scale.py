"""Loss scaling of another system's fp16 run as `train.loss_scale`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from megalin.interop.configs.flags import Flags
from megalin.interop.configs.imported import ImportedConfig
from megalin.train.precision import LARGEST_SCALE, LossScaleConfig

_DEFAULTS = LossScaleConfig()


class Setting(NamedTuple):
    """A setting of the other system: its name there, and its value or default."""

    name: str
    value: Any


class LossScaling(NamedTuple):
    """The settings of an fp16 run."""

    static: Setting
    """A scale that never changes; 0 or None: it is dynamic."""
    initial: Setting
    window: Setting
    """Steps without an overflow before the scale grows."""
    minimum: Setting
    hysteresis: Setting
    """Overflows before the scale falls."""


def add_loss_scale(scaling: LossScaling, imported: ImportedConfig) -> None:
    """Sets `train.loss_scale` where it differs from its defaults, and notes each setting without an equal one."""
    if scaling.static.value:
        text = "the scale is dynamic, from train.loss_scale.initial on"
        imported.note("differs", f"{scaling.static.name} {scaling.static.value:g}", text)
        return
    name, window = scaling.window
    if window != _DEFAULTS.growth_interval:
        imported.set("train.loss_scale.growth_interval", int(window), name)
    _set_scale(imported, "initial", scaling.initial)
    _set_scale(imported, "minimum", scaling.minimum)
    name, hysteresis = scaling.hysteresis
    if hysteresis != 1:
        text = f"the scale is halved at every overflow, not after {hysteresis} of them"
        imported.note("differs", name, text)


def scaling_of_flags(flags: Flags) -> LossScaling:
    """The loss scaling of a Megatron-LM run with --fp16, with its defaults."""

    def setting(name: str, default: int) -> Setting:
        value = flags.number(name)
        if value is None:
            return Setting(f"{name} (default)", default)
        return Setting(name, int(value) if value == int(value) else value)

    return LossScaling(
        static=setting("--loss-scale", 0),
        initial=setting("--initial-loss-scale", 2**32),
        window=setting("--loss-scale-window", 1000),
        minimum=setting("--min-loss-scale", 1),
        hysteresis=setting("--hysteresis", 2),
    )


def _set_scale(imported: ImportedConfig, field: str, setting: Setting) -> None:
    """Sets a scale of `train.loss_scale`, or the nearest one that it can have, with a note."""
    name, value = setting
    nearest = min(max(value, 1.0), LARGEST_SCALE)
    nearest = 2.0 ** math.floor(math.log2(nearest))
    if nearest != value:
        text = f"{nearest:g}, since scales are powers of two up to 2^24"
        imported.note("differs", f"{name} {value:g}", f"train.loss_scale.{field} = {text}")
    if nearest != getattr(_DEFAULTS, field):
        imported.set(f"train.loss_scale.{field}", nearest, name)
