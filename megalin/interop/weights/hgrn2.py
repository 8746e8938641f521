"""The layout of HGRN2 in flash-linear-attention: names, config.json, and the variants that our mixers support."""

from __future__ import annotations

from typing import Any

from megalin.interop.weights.layout import CheckpointLayout, Link, norm
from megalin.interop.weights.settings import MAX_RATIO, Settings
from megalin.model.config import ModelConfig

OUTPUT_NORM_EPS = 1e-5
"""eps of the norm after the scan, independent of norm_eps."""


def _to_model(settings: Settings) -> dict[str, Any]:
    width = settings.integer("hidden_size")
    heads = width // _head_dim(settings, width)
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("norm_eps", 1e-6)}
    mixer = {
        "type": "hgrn2",
        "num_heads": heads,
        "scan_scale": "inverse_sqrt",
        "output_norm": "rmsnorm" if settings.flag("elementwise_affine", True) else "srmsnorm",
        "output_norm_eps": OUTPUT_NORM_EPS,
        **norms,
    }
    # The default width is a multiple of 256, as in the class.
    size = -(-int(width * settings.number("hidden_ratio", 4, maximum=MAX_RATIO) * 2 / 3) // 256) * 256
    glu = {
        "type": "glu",
        "intermediate_size": settings.integer("intermediate_size", size),
        "activation": "silu",
        **norms,
    }
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": width,
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "init_std": settings.number("initializer_range", 0.02),
        "layers": [{"sublayers": [mixer, glu], "repeat": settings.integer("num_hidden_layers")}],
        **norms,
    }


def _head_dim(settings: Settings, width: int) -> int:
    """Width of a head's keys: expand_ratio, which takes precedence over num_heads, or 128 if neither is set."""
    if settings.has("expand_ratio") or not settings.has("num_heads"):
        ratio = settings.integer("expand_ratio", 128)
        if width % ratio:
            raise settings.problem("expand_ratio", f"it must divide hidden_size = {width}")
        return ratio
    heads = settings.integer("num_heads")
    if width % heads:
        raise settings.problem("num_heads", f"it must divide hidden_size = {width}")
    return width // heads


def _to_settings(model: ModelConfig) -> dict[str, Any]:
    mixer, glu = (sublayer.model_dump() for sublayer in model.layers[0].sublayers)
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_heads": mixer["num_heads"],
        "expand_ratio": model.hidden_size // mixer["num_heads"],
        "elementwise_affine": True,
        "intermediate_size": glu["intermediate_size"],
        "norm_eps": model.norm_eps,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }


_MIXER = (
    norm("0.norm.weight", "attn_norm.weight"),
    Link("0.mixer.qfv.weight", ("attn.q_proj.weight", "attn.f_proj.weight", "attn.i_proj.weight"), (0, 1, 2)),
    norm("0.mixer.out.norm_weight", "attn.g_norm.weight"),
    Link("0.mixer.out.weight", ("attn.o_proj.weight",)),
    norm("1.norm.weight", "mlp_norm.weight"),
)
_DOWN = Link("1.mixer.down.weight", ("mlp.down_proj.weight",))

HGRN2 = CheckpointLayout(
    format="fla",
    architecture="HGRN2ForCausalLM",
    model_type="hgrn2",
    sublayers=("hgrn2", "glu"),
    required_keys=(),
    layers="model.layers.{}.",
    block=(*_MIXER, Link("1.mixer.up.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (0, 1)), _DOWN),
    older_block=(*_MIXER, Link("1.mixer.up.weight", ("mlp.gate_proj.weight",), (0, 1)), _DOWN),
    model=(
        Link("embedding.weight", ("model.embeddings.weight",)),
        Link("shared.hgrn2.rows.gamma", ("model.lower_bounds",)),
        norm("norm.weight", "model.norm.weight"),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={
        "hidden_act": ("swish",),
        "use_short_conv": (False,),
        "use_lower_bound": (True,),
        "attn": (None,),
        "attnres_block_size": (None,),
    },
    to_model=_to_model,
    to_settings=_to_settings,
)
