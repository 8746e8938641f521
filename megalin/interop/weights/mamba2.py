"""The layout of Mamba-2 in transformers: names, config.json, and the variant that our mixer supports."""

from __future__ import annotations

from typing import Any

from megalin.interop.weights.layout import Link, norm
from megalin.interop.weights.mamba import MAMBA, model_values, settings_of
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig

_UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Time steps without a limit, in both spellings of transformers."""


def _to_model(settings: Settings) -> dict[str, Any]:
    width = settings.integer("hidden_size")
    heads, head_dim = settings.integer("num_heads", 128), settings.integer("head_dim", 64)
    if heads * head_dim != 2 * width:
        raise settings.problem("num_heads", f"times head_dim = {head_dim} must be twice hidden_size = {width}")
    if settings.has("time_step_limit") and settings.values["time_step_limit"] not in _UNLIMITED:
        raise settings.problem("time_step_limit", "supported: [0.0, Infinity]; our time steps have no limit")
    mixer = {
        "type": "mamba2",
        "head_dim": head_dim,
        "state_size": settings.integer("state_size", 128),
        "num_groups": settings.integer("n_groups", 8),
        "conv_width": settings.integer("conv_kernel", 4),
    }
    return model_values(settings, mixer, tied=False)


def _to_settings(model: ModelConfig) -> dict[str, Any]:
    mixer = model.layers[0].sublayers[0].model_dump()
    return settings_of(model, mixer) | {
        "num_heads": 2 * model.hidden_size // mixer["head_dim"],
        "head_dim": mixer["head_dim"],
        "n_groups": mixer["num_groups"],
    }


MAMBA2 = MAMBA._replace(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    sublayers=("mamba2",),
    block=(
        norm("0.norm.weight", "norm.weight"),
        Link("0.mixer.zx.weight", ("mixer.in_proj.weight",), stacked=("0.mixer.bc", "0.mixer.time_step.weight")),
        Link("0.mixer.conv_weight", ("mixer.conv1d.weight",), stacked=("0.mixer.bc_conv_weight",), extra_dim=True),
        Link("0.mixer.conv_bias", ("mixer.conv1d.bias",), stacked=("0.mixer.bc_conv_bias",), bias=True),
        Link("0.mixer.full_precision.step_bias", ("mixer.dt_bias",)),
        Link("0.mixer.full_precision.a_log", ("mixer.A_log",)),
        Link("0.mixer.full_precision.feed_through", ("mixer.D",)),
        Link("0.mixer.out.norm_weight", ("mixer.norm.weight",)),
        Link("0.mixer.out.weight", ("mixer.out_proj.weight",)),
    ),
    to_model=_to_model,
    to_settings=_to_settings,
)
