"""The layout of Mamba-2 in transformers: names, config.json, and the variant that our mixer supports."""

from __future__ import annotations

from typing import Any

from megalin.interop.weights.layout import CheckpointLayout, Link, norm
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
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("layer_norm_epsilon", 1e-5)}
    mixer = {
        "type": "mamba2",
        "head_dim": head_dim,
        "state_size": settings.integer("state_size", 128),
        "num_groups": settings.integer("n_groups", 8),
        "conv_width": settings.integer("conv_kernel", 4),
        **norms,
    }
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": width,
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "init_std": settings.number("initializer_range", 0.1),
        "output_init": "scaled_by_depth" if settings.flag("rescale_prenorm_residual", False) else "plain",
        "residual_dtype": "float32" if settings.flag("residual_in_fp32", True) else "compute",
        "layers": [{"sublayers": [mixer], "repeat": settings.integer("num_hidden_layers")}],
        **norms,
    }


def _to_settings(model: ModelConfig) -> dict[str, Any]:
    mixer = model.layers[0].sublayers[0].model_dump()
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_heads": 2 * model.hidden_size // mixer["head_dim"],
        "head_dim": mixer["head_dim"],
        "state_size": mixer["state_size"],
        "n_groups": mixer["num_groups"],
        "conv_kernel": mixer["conv_width"],
        "layer_norm_epsilon": model.norm_eps,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "rescale_prenorm_residual": model.output_init == "scaled_by_depth",
        "residual_in_fp32": model.residual_dtype == "float32",
    }


MAMBA2 = CheckpointLayout(
    format="transformers",
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    sublayers=("mamba2",),
    required_keys=(),
    layers="backbone.layers.{}.",
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
    model=(
        Link("embedding.weight", ("backbone.embeddings.weight",)),
        norm("norm.weight", "backbone.norm_f.weight"),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={
        "expand": (2,),
        "hidden_act": ("silu", "swish"),
        "use_bias": (False,),
        "use_conv_bias": (True,),
    },
    to_model=_to_model,
    to_settings=_to_settings,
)
