"""The layout of LLaMA in transformers: names, config.json, and the variants that our mixers support.

The rows of queries and keys need no permutation: both sides rotate the halves of a head, not neighbouring pairs.
"""

from __future__ import annotations

from typing import Any

from megalin.interop.weights.layout import CheckpointLayout, Link, norm
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig

ROPE_BASE = 10000.0


def _to_model(settings: Settings) -> dict[str, Any]:
    width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    if settings.integer("head_dim", max(1, width // heads)) * heads != width:
        raise settings.problem("head_dim", f"supported: hidden_size / num_attention_heads = {width} / {heads}")
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("rms_norm_eps", 1e-6)}
    attention = {
        "type": "softmax",
        "num_heads": heads,
        "num_key_value_heads": settings.integer("num_key_value_heads", heads),
        "rope_base": _rope_base(settings),
        **norms,
    }
    glu = {
        "type": "glu",
        "intermediate_size": settings.integer("intermediate_size"),
        "activation": "silu",
        **norms,
    }
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": width,
        "tie_embeddings": settings.flag("tie_word_embeddings", False),
        "init_std": settings.number("initializer_range", 0.02),
        "layers": [{"sublayers": [attention, glu], "repeat": settings.integer("num_hidden_layers")}],
        **norms,
    }


def _rope_base(settings: Settings) -> float:
    """The rotary base, from the key of either generation of transformers. Raises CheckpointError if positions are
    scaled."""
    table = settings.table("rope_parameters")
    if table.values.get("rope_type", "default") != "default":
        raise table.problem("rope_type", "supported: 'default', without scaling")
    old = settings.number("rope_theta", table.number("rope_theta", ROPE_BASE))
    new = table.number("rope_theta", old)
    if old != new:
        raise settings.problem("rope_theta", f"but rope_parameters.rope_theta = {new}; correct the wrong one")
    return new


def _to_settings(model: ModelConfig) -> dict[str, Any]:
    attention, glu = (sublayer.model_dump() for sublayer in model.layers[0].sublayers)
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention["num_heads"],
        "num_key_value_heads": attention["num_key_value_heads"] or attention["num_heads"],
        "head_dim": model.hidden_size // attention["num_heads"],
        "intermediate_size": glu["intermediate_size"],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": attention["rope_base"],
        "rope_parameters": {"rope_theta": attention["rope_base"], "rope_type": "default"},
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }


LLAMA = CheckpointLayout(
    format="transformers",
    architecture="LlamaForCausalLM",
    model_type="llama",
    sublayers=("softmax", "glu"),
    required_keys=(),
    layers="model.layers.{}.",
    block=(
        norm("0.norm.weight", "input_layernorm.weight"),
        Link("0.mixer.q.weight", ("self_attn.q_proj.weight",)),
        Link("0.mixer.kv.weight", ("self_attn.k_proj.weight", "self_attn.v_proj.weight"), (0, 1)),
        Link("0.mixer.out.weight", ("self_attn.o_proj.weight",)),
        norm("1.norm.weight", "post_attention_layernorm.weight"),
        Link("1.mixer.up.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (0, 1)),
        Link("1.mixer.down.weight", ("mlp.down_proj.weight",)),
    ),
    model=(
        Link("embedding.weight", ("model.embed_tokens.weight",)),
        norm("norm.weight", "model.norm.weight"),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_scaling": (None,),
    },
    to_model=_to_model,
    to_settings=_to_settings,
    ignored=(".rotary_emb.inv_freq",),
)
