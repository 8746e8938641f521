"""The layout of Mamba-1 in transformers: names, config.json, and the variant that our mixer supports."""

from __future__ import annotations

from typing import Any

from megalin.interop.weights.layout import CheckpointLayout, Link, norm
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig


def model_values(settings: Settings, mixer: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The values of a model whose blocks are the mixer alone; `tied` is the class's default for the embeddings."""
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("layer_norm_epsilon", 1e-5)}
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": settings.integer("hidden_size"),
        "tie_embeddings": settings.flag("tie_word_embeddings", tied),
        "init_std": settings.number("initializer_range", 0.1),
        "output_init": "scaled_by_depth" if settings.flag("rescale_prenorm_residual", False) else "plain",
        "residual_dtype": "float32" if settings.flag("residual_in_fp32", True) else "compute",
        "layers": [{"sublayers": [mixer | norms], "repeat": settings.integer("num_hidden_layers")}],
        **norms,
    }


def settings_of(model: ModelConfig, mixer: dict[str, Any]) -> dict[str, Any]:
    """The keys that the config.json of both versions has."""
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "state_size": mixer["state_size"],
        "conv_kernel": mixer["conv_width"],
        "layer_norm_epsilon": model.norm_eps,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "rescale_prenorm_residual": model.output_init == "scaled_by_depth",
        "residual_in_fp32": model.residual_dtype == "float32",
    }


def _to_model(settings: Settings) -> dict[str, Any]:
    width = settings.integer("hidden_size")
    if settings.integer("intermediate_size", 2 * width) != 2 * width:
        raise settings.problem("intermediate_size", f"supported: twice hidden_size = {width}")
    mixer = {
        "type": "mamba1",
        "state_size": settings.integer("state_size", 16),
        "conv_width": settings.integer("conv_kernel", 4),
        "step_rank": _step_rank(settings, width),
    }
    return model_values(settings, mixer, tied=True)


def _step_rank(settings: Settings, width: int) -> int:
    """Rank of the time steps; "auto" derives it from the width."""
    if settings.values.get("time_step_rank", "auto") in ("auto", None):
        return -(-width // 16)
    return settings.integer("time_step_rank")


def _to_settings(model: ModelConfig) -> dict[str, Any]:
    mixer = model.layers[0].sublayers[0].model_dump()
    return settings_of(model, mixer) | {
        "intermediate_size": 2 * model.hidden_size,
        "time_step_rank": -(-model.hidden_size // 16) if mixer["step_rank"] is None else mixer["step_rank"],
    }


MAMBA = CheckpointLayout(
    format="transformers",
    architecture="MambaForCausalLM",
    model_type="mamba",
    sublayers=("mamba1",),
    required_keys=(),
    layers="backbone.layers.{}.",
    block=(
        norm("0.norm.weight", "norm.weight"),
        Link("0.mixer.xz.weight", ("mixer.in_proj.weight",), (0, 1)),
        Link("0.mixer.conv.weight", ("mixer.conv1d.weight",), extra_dim=True),
        Link("0.mixer.conv.bias", ("mixer.conv1d.bias",)),
        Link("0.mixer.selection", ("mixer.x_proj.weight",)),
        Link("0.mixer.time_step", ("mixer.dt_proj.weight",)),
        Link("0.mixer.full_precision.step_bias", ("mixer.dt_proj.bias",)),
        Link("0.mixer.full_precision.a_log", ("mixer.A_log",)),
        Link("0.mixer.full_precision.feed_through", ("mixer.D",)),
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
