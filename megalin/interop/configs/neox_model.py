"""The network of a gpt-neox config as a decoder of softmax attention and a channel mixer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalin.interop.configs.imported import ImportedConfig

MODEL_KEYS = {
    "activation",
    "attention_config",
    "attention_dropout",
    "bias_gelu_fusion",
    "expansion_factor",
    "feedforward_size",
    "gpt_j_residual",
    "hidden_dropout",
    "hidden_size",
    "init_method",
    "init_method_std",
    "intermediate_size",
    "layernorm_epsilon",
    "mlp_multiple_of",
    "no_weight_tying",
    "norm",
    "num_attention_heads",
    "num_kv_heads",
    "num_layers",
    "output_layer_init_method",
    "pos_emb",
    "rms_norm_epsilon",
    "rotary_emb_base",
    "rotary_pct",
    "scalenorm_epsilon",
    "sliding_window_width",
    "use_bias_in_attn_linear",
    "use_bias_in_mlp",
    "use_bias_in_norms",
    "vocab_size",
}
"""Keys of the network."""
_PLAIN = {"gelu": "gelu", "relu": "relu", "swish": "silu", "silu": "silu"}
"""Activations of MLPs without a gate."""
_GATED = {"swiglu": "silu", "bilinear": "none"}
"""Activations of GLUs."""
_OTHER_GATED = ("geglu", "reglu", "glu")
_FULL_ATTENTION = ("global", "flash")


def add_neox_model(settings: Mapping[str, Any], imported: ImportedConfig) -> None:
    """Reads gpt-neox's keys of the network into the table `model`."""
    width, layers = _size(settings, "hidden_size", imported), _size(settings, "num_layers", imported)
    if (vocabulary := _size(settings, "vocab_size", imported)) is not None:
        imported.set("model.vocab_size", vocabulary, "vocab_size")
    imported.hint("model.vocab_size", "gpt-neox reads it from the tokenizer: the number of its ids")
    if width is not None:
        imported.set("model.hidden_size", width, "hidden_size")
    imported.set("model.tie_embeddings", not settings.get("no_weight_tying", False), "no_weight_tying (false)")
    norm = _norm(settings, imported)
    for key, value in norm.items():
        imported.set(f"model.{key}", value, "norm (layernorm) and its epsilon")
    _initialization(settings, imported, width)
    for key in ("hidden_dropout", "embedding_dropout"):
        if rate := settings.get("hidden_dropout", 0.0):
            imported.set(f"model.{key}", rate, "hidden_dropout")
    if rate := settings.get("attention_dropout", 0.0):
        imported.note("differs", f"attention_dropout {rate}", "attention probabilities have no dropout")
    if settings.get("gpt_j_residual"):
        text = "the channel mixer reads the attention's result; gpt-neox computes both from the same input"
        imported.note("differs", "gpt_j_residual", text)
    attention, mixer = _attention(settings, imported) | norm, _channel_mixer(settings, imported, width) | norm
    if layers is not None and "num_heads" in attention and "intermediate_size" in mixer:
        block = {"repeat": layers, "sublayers": [attention, mixer]}
        imported.set("model.layers", [block], "num_layers, num_attention_heads, activation and intermediate_size")
    else:
        imported.hint("model.layers", "needs num_layers, hidden_size and num_attention_heads")


def _size(settings: Mapping[str, Any], key: str, imported: ImportedConfig) -> int | None:
    """A positive integer; None if it is absent or something else, which is noted."""
    value = settings.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        imported.note("fill in", key, f"{value!r} is not a positive integer")
        return None
    return value


def _norm(settings: Mapping[str, Any], imported: ImportedConfig) -> dict[str, Any]:
    kind = str(settings.get("norm", "layernorm"))
    name = kind.removeprefix("te_")
    if name == "rmsnorm":
        return {"norm": "rmsnorm", "norm_eps": _number(settings, "rms_norm_epsilon", 1e-8, imported)}
    if name != "layernorm":
        imported.note("differs", f"norm {kind}", "layernorm instead")
    if not settings.get("use_bias_in_norms", True):
        imported.note("differs", "use_bias_in_norms false", "layer norms have a bias, which starts at zero")
    return {"norm": "layernorm", "norm_eps": _number(settings, "layernorm_epsilon", 1e-5, imported)}


def _number(settings: Mapping[str, Any], key: str, default: float, imported: ImportedConfig) -> float:
    value = settings.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        imported.note("fill in", key, f"{value!r} is not a number")
        return default
    return number


def _initialization(settings: Mapping[str, Any], imported: ImportedConfig, width: int | None) -> None:
    kind, out = settings.get("init_method", "normal"), settings.get("output_layer_init_method", "scaled_normal")
    std = _number(settings, "init_method_std", 0.02, imported)
    if kind == "small_init" and width is not None:
        std = math.sqrt(2 / (5 * width))
    elif kind != "normal":
        imported.note("differs", f"init_method {kind}", f"normal with standard deviation {std} instead")
    imported.set("model.init_std", std, "init_method (normal), init_method_std (0.02)")
    imported.set("model.output_init", "plain" if out == kind else "scaled_by_depth", "output_layer_init_method")
    if out != kind and (out, kind) != ("scaled_normal", "normal"):
        imported.note("differs", f"output_layer_init_method {out}", "model.init_std over the root of the sub-layers")


def _attention(settings: Mapping[str, Any], imported: ImportedConfig) -> dict[str, Any]:
    sublayer: dict[str, Any] = {"type": "softmax"}
    for key, name in (("num_attention_heads", "num_heads"), ("num_kv_heads", "num_key_value_heads")):
        if (heads := _size(settings, key, imported)) is not None:
            sublayer[name] = heads
    if "rotary_emb_base" in settings:
        sublayer["rope_base"] = _number(settings, "rotary_emb_base", 10000, imported)
    if (width := _size(settings, "sliding_window_width", imported)) is not None:
        sublayer["window"] = width + 1  # gpt-neox counts the tokens before the token itself
    if (kind := settings.get("pos_emb", "learned")) != "rotary":
        imported.note("differs", f"pos_emb {kind}", "positions are rotary")
    elif (percent := settings.get("rotary_pct", 1.0)) != 1:
        imported.note("differs", f"rotary_pct {percent}", "all channels of a head are rotated")
    if others := _kinds(settings.get("attention_config")) - set(_FULL_ATTENTION):
        text = "causal softmax attention instead; write other mixers under model.layers"
        imported.note("differs", f"attention_config {', '.join(sorted(others))}", text)
    if settings.get("use_bias_in_attn_linear", True):
        sublayer |= {"qkv_bias": True, "output_bias": True}
    return sublayer


def _kinds(config: Any) -> set[str]:
    """Names of attention in the nested lists of `attention_config`."""
    if isinstance(config, str):
        return {config}
    return set().union(*map(_kinds, config)) if isinstance(config, list) else set()


def _channel_mixer(settings: Mapping[str, Any], imported: ImportedConfig, hidden: int | None) -> dict[str, Any]:
    """The MLP or GLU; gpt-neox divides a GLU's width by 1.5 and rounds it up to `mlp_multiple_of`."""
    name = next((key for key in ("intermediate_size", "feedforward_size") if key in settings), "")
    width = _size(settings, name, imported) if name else None
    if width is None and hidden is not None:
        width = int(_number(settings, "expansion_factor", 4, imported) * hidden)
    kind, bias = str(settings.get("activation", "gelu")), bool(settings.get("use_bias_in_mlp", True))
    gated = kind in (*_GATED, *_OTHER_GATED)
    sublayer: dict[str, Any] = {"type": "glu" if gated else "ffn", "bias": bias}
    if gated:
        sublayer["activation"] = _GATED.get(kind, "silu")
    else:
        sublayer["activation"] = _PLAIN.get(kind, "gelu")
    if kind not in (*_GATED, *_PLAIN):
        imported.note("differs", f"activation {kind}", f"{sublayer['activation']} instead")
    if kind == "gelu" and settings.get("bias_gelu_fusion"):
        sublayer["activation"] = "gelu_tanh"
    if width is not None:
        multiple = _size(settings, "mlp_multiple_of", imported) or 1
        width = width * 2 // 3 // 2 if gated else width
        sublayer["intermediate_size"] = -(-width // multiple) * multiple
    return sublayer
