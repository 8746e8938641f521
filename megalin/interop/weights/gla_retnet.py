"""The layouts of GLA and RetNet in flash-linear-attention, both of the `recurrence` mixer and a SwiGLU."""

from __future__ import annotations

from typing import Any

from megalin.errors import ConfigError
from megalin.interop.weights.layout import CheckpointLayout, Link, norm
from megalin.interop.weights.settings import MAX_RATIO, Settings
from megalin.model.config import ModelConfig

GATE_RANK = 16
"""Rank of GLA's decay gate, which config.json does not have."""
GLU_MULTIPLE = 256
"""The class rounds the default width of its GLU up to a multiple of this."""


def _model(settings: Settings, mixer: dict[str, Any], *, ratio: int) -> dict[str, Any]:
    width, heads = settings.integer("hidden_size"), settings.integer("num_heads")
    if settings.integer("num_kv_heads", heads) != heads:
        raise settings.problem("num_kv_heads", f"supported: num_heads = {heads}, keys and values of each head")
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("norm_eps", 1e-6)}
    short = {"conv_width": settings.integer("conv_size", 4)} if settings.flag("use_short_conv", False) else {}
    activation = {"activation": "silu"} if settings.has("feature_map") else {}
    size = int(width * settings.number("hidden_ratio", ratio, maximum=MAX_RATIO) * 2 / 3)
    glu = {
        "type": "glu",
        "intermediate_size": settings.integer("intermediate_size", -(-size // GLU_MULTIPLE) * GLU_MULTIPLE),
        "activation": "silu",
        **norms,
    }
    recurrence = {"type": "recurrence", "num_heads": heads, **mixer, **short, **activation, **norms}
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": width,
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "init_std": settings.number("initializer_range", 0.02),
        "layers": [{"sublayers": [recurrence, glu], "repeat": settings.integer("num_hidden_layers")}],
        **norms,
    }


def _widths(settings: Settings, *, expand_k: float, expand_v: float) -> dict[str, Any]:
    return {
        "expand_k": settings.number("expand_k", expand_k, maximum=MAX_RATIO),
        "expand_v": settings.number("expand_v", expand_v, maximum=MAX_RATIO),
    }


def _gla_model(settings: Settings) -> dict[str, Any]:
    mixer = {"decay": "vector", "decay_rank": GATE_RANK, **_widths(settings, expand_k=0.5, expand_v=1.0)}
    return _model(settings, mixer, ratio=4)


def _retnet_model(settings: Settings) -> dict[str, Any]:
    mixer = {"decay": "fixed", "positions": "rope", **_widths(settings, expand_k=1.0, expand_v=2.0)}
    return _model(settings, mixer, ratio=2)


def _to_settings(model: ModelConfig) -> dict[str, Any]:
    mixer, glu = (sublayer.model_dump() for sublayer in model.layers[0].sublayers)
    if mixer["head_norm"] != "rmsnorm":
        raise ConfigError(
            f'model.layers.0.sublayers.0.head_norm = "{mixer["head_norm"]}": flash-linear-attention\'s classes have a '
            'norm with a weight; use "rmsnorm"'
        )
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_heads": mixer["num_heads"],
        "expand_k": mixer["expand_k"],
        "expand_v": mixer["expand_v"],
        "use_short_conv": mixer["conv_width"] is not None,
        "conv_size": mixer["conv_width"] or 4,
        "feature_map": "silu" if mixer["activation"] == "silu" else None,
        "intermediate_size": glu["intermediate_size"],
        "norm_eps": model.norm_eps,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }


_HEADS = (
    norm("0.norm.weight", "attn_norm.weight"),
    Link("0.mixer.qk.weight", ("attn.q_proj.weight", "attn.k_proj.weight"), (0, 1)),
    Link("0.mixer.vg.weight", ("attn.v_proj.weight", "attn.g_proj.weight"), (0, 1)),
    *(
        Link(f"0.mixer.conv_{part}", (f"attn.{part}_conv1d.weight",), extra_dim=True, absent="skip")
        for part in ("q", "k", "v")
    ),
)
_GATE = (
    Link("0.mixer.decay_gate.logit.down", ("attn.gk_proj.0.weight",)),
    Link("0.mixer.decay_gate.logit.up", ("attn.gk_proj.1.weight",)),
    Link("0.mixer.full_precision.bias", ("attn.gk_proj.1.bias",)),
)
_OUTPUT = (
    Link("0.mixer.norm_weight", ("attn.g_norm_swish_gate.weight",)),
    Link("0.mixer.out.weight", ("attn.o_proj.weight",)),
    norm("1.norm.weight", "mlp_norm.weight"),
    Link("1.mixer.up.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (0, 1)),
    Link("1.mixer.down.weight", ("mlp.down_proj.weight",)),
)

GLA = CheckpointLayout(
    format="fla",
    architecture="GLAForCausalLM",
    model_type="gla",
    sublayers=("recurrence", "glu"),
    required_keys=(),
    layers="model.layers.{}.",
    block=(*_HEADS, *_GATE, *_OUTPUT),
    model=(
        Link("embedding.weight", ("model.embeddings.weight",)),
        norm("norm.weight", "model.norm.weight"),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={
        "hidden_act": ("swish",),
        "use_output_gate": (True,),
        "elementwise_affine": (True,),
        "fuse_norm": (True,),
        "use_gk": (True,),
        "use_gv": (False,),
        "feature_map": (None, "silu", "swish"),
        "clamp_min": (None,),
        "attn": (None,),
        "attnres_block_size": (None,),
    },
    to_model=_gla_model,
    to_settings=_to_settings,
    fits=lambda model: model.layers[0].sublayers[0].model_dump()["decay"] != "fixed",
)
RETNET = GLA._replace(
    architecture="RetNetForCausalLM",
    model_type="retnet",
    block=(*_HEADS, *_OUTPUT),
    fixed={key: values for key, values in GLA.fixed.items() if key not in ("use_gk", "use_gv", "clamp_min")},
    to_model=_retnet_model,
    fits=lambda model: model.layers[0].sublayers[0].model_dump()["decay"] == "fixed",
    ignored=(".rotary.inv_freq",),
)
