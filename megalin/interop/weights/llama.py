"""The layouts of LLaMA, Mistral, Qwen2 and Qwen3 in transformers: names, config.json and supported variants.

The rows of queries and keys need no permutation: both sides rotate the halves of a head, not neighbouring pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from megalin.interop.weights.layout import CheckpointLayout, Link, norm
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig

ROPE_BASE = 10000.0
_SILU = ("silu", "swish")
_FACTORS = {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"}


_ATTENTION_BIAS, _MLP_BIAS = "attention_bias", "mlp_bias"
"""Keys of biases: of all four projections of attention, and of all three of the GLU."""


def _to_model(
    settings: Settings, *, keys: tuple[str, ...], qkv_bias: bool = False, qk_norm: bool = False
) -> dict[str, Any]:
    """`keys`: those of biases that the class reads; `qkv_bias`: it always has them, on three projections."""
    width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_dim = settings.integer("head_dim", max(1, width // heads))
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("rms_norm_eps", 1e-6)}
    kinds = settings.values.get("layer_types")
    if kinds is not None and set(kinds) != {"full_attention"}:
        raise settings.problem("layer_types", "supported: full_attention in every layer")
    attention_bias, mlp_bias = (key in keys and settings.flag(key, False) for key in (_ATTENTION_BIAS, _MLP_BIAS))
    attention = {
        "type": "softmax",
        "num_heads": heads,
        "num_key_value_heads": settings.integer("num_key_value_heads", heads),
        "head_dim": None if head_dim * heads == width else head_dim,
        "qkv_bias": qkv_bias or attention_bias,
        "output_bias": attention_bias,
        "qk_norm": qk_norm,
        "rope_base": _rope_base(settings),
        "rope_scaling": _rope_scaling(settings),
        **norms,
    }
    glu = {
        "type": "glu",
        "intermediate_size": settings.integer("intermediate_size"),
        "activation": "silu",
        "bias": mlp_bias,
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
    """The rotary base, from the key of either generation of transformers. Raises CheckpointError if they differ."""
    table = settings.table("rope_parameters")
    old = settings.number("rope_theta", table.number("rope_theta", ROPE_BASE))
    new = table.number("rope_theta", old)
    if old != new:
        raise settings.problem("rope_theta", f"but rope_parameters.rope_theta = {new}; correct the wrong one")
    return new


def _rope_scaling(settings: Settings) -> dict[str, Any] | None:
    """The change of the frequencies, from the table of either generation. Raises CheckpointError if unsupported."""
    tables = [settings.table(name) for name in ("rope_parameters", "rope_scaling") if settings.has(name)]
    scalings = [_scaling(table) for table in tables]
    if any(scaling != scalings[0] for scaling in scalings):
        raise settings.problem("rope_scaling", "but rope_parameters differs; correct the wrong one")
    return scalings[0] if scalings else None


def _scaling(table: Settings) -> dict[str, Any] | None:
    key = "rope_type" if table.has("rope_type") else "type"
    kind = table.values.get(key, "default")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise table.problem(key, "supported: 'default', 'linear' and 'llama3'")
    scaling = {"type": kind, "factor": table.number("factor")}
    if kind == "llama3":
        scaling |= {ours: table.number(theirs) for ours, theirs in _FACTORS.items()}
        scaling["original_length"] = table.integer("original_max_position_embeddings")
    return scaling


def _to_settings(model: ModelConfig, *, keys: tuple[str, ...]) -> dict[str, Any]:
    attention, glu = (sublayer.model_dump() for sublayer in model.layers[0].sublayers)
    biases = {_ATTENTION_BIAS: attention["output_bias"], _MLP_BIAS: glu["bias"]}
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention["num_heads"],
        "num_key_value_heads": attention["num_key_value_heads"] or attention["num_heads"],
        "head_dim": attention["head_dim"] or model.hidden_size // attention["num_heads"],
        "intermediate_size": glu["intermediate_size"],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": attention["rope_base"],
        "rope_parameters": {"rope_theta": attention["rope_base"], **_rope_settings(attention["rope_scaling"])},
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        **{key: value for key, value in biases.items() if key in keys},
    }


def _rope_settings(scaling: dict[str, Any] | None) -> dict[str, Any]:
    """The keys of `_rope_scaling`."""
    if scaling is None:
        return {"rope_type": "default"}
    settings = {"rope_type": scaling["type"], "factor": scaling["factor"]}
    if scaling["type"] == "llama3":
        settings |= {theirs: scaling[ours] for ours, theirs in _FACTORS.items()}
        settings["original_max_position_embeddings"] = scaling["original_length"]
    return settings


def _variant(name: Literal["llama", "qwen2", "qwen3"]) -> Callable[[ModelConfig], bool]:
    """Whether the biases and norms of a model's attention are closest to this class."""

    def fits(model: ModelConfig) -> bool:
        attention = model.layers[0].sublayers[0].model_dump()
        if attention["qk_norm"]:
            return name == "qwen3"
        return name == ("qwen2" if attention["qkv_bias"] and not attention["output_bias"] else "llama")

    return fits


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
        Link("0.mixer.q.bias", ("self_attn.q_proj.bias",), bias=True, absent="skip"),
        Link("0.mixer.kv.bias", ("self_attn.k_proj.bias", "self_attn.v_proj.bias"), (0, 1), bias=True, absent="skip"),
        Link("0.mixer.q_norm", ("self_attn.q_norm.weight",), absent="skip"),
        Link("0.mixer.k_norm", ("self_attn.k_norm.weight",), absent="skip"),
        Link("0.mixer.out.weight", ("self_attn.o_proj.weight",)),
        Link("0.mixer.out.bias", ("self_attn.o_proj.bias",), absent="skip"),
        norm("1.norm.weight", "post_attention_layernorm.weight"),
        Link("1.mixer.up.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (0, 1)),
        Link("1.mixer.up.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias"), (0, 1), bias=True, absent="skip"),
        Link("1.mixer.down.weight", ("mlp.down_proj.weight",)),
        Link("1.mixer.down.bias", ("mlp.down_proj.bias",), absent="skip"),
    ),
    model=(
        Link("embedding.weight", ("model.embed_tokens.weight",)),
        norm("norm.weight", "model.norm.weight"),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={"hidden_act": _SILU},
    to_model=partial(_to_model, keys=(_ATTENTION_BIAS, _MLP_BIAS)),
    to_settings=partial(_to_settings, keys=(_ATTENTION_BIAS, _MLP_BIAS)),
    ignored=(".rotary_emb.inv_freq",),
    fits=_variant("llama"),
)
MISTRAL = LLAMA._replace(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fixed={"hidden_act": _SILU, "sliding_window": (None,)},
    to_model=partial(_to_model, keys=()),
    to_settings=partial(_to_settings, keys=()),
)
QWEN2 = LLAMA._replace(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    fixed={"hidden_act": _SILU, "use_sliding_window": (False,)},
    to_model=partial(_to_model, keys=(), qkv_bias=True),
    to_settings=partial(_to_settings, keys=()),
    fits=_variant("qwen2"),
)
QWEN3 = LLAMA._replace(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fixed={"hidden_act": _SILU, "use_sliding_window": (False,)},
    to_model=partial(_to_model, keys=(_ATTENTION_BIAS,), qk_norm=True),
    to_settings=partial(_to_settings, keys=(_ATTENTION_BIAS,)),
    fits=_variant("qwen3"),
)
