"""The layouts of Rodimus and Rodimus+ in flash-linear-attention and in their authors' own code."""

from __future__ import annotations

import math
from typing import Any

from megalin.errors import ConfigError
from megalin.interop.weights.layout import CheckpointLayout, Link, norm
from megalin.interop.weights.settings import MAX_RATIO, Settings
from megalin.model.config import ModelConfig

FFN_MULTIPLE = 8
DEFAULT_RATIO = 4 / 3


def _model(settings: Settings, sublayers: list[dict[str, Any]], *, width: int, layers: int) -> dict[str, Any]:
    """The model table; `settings` is the top level of config.json."""
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": width,
        "init_std": settings.number("initializer_range", 0.02),
        "residual_dtype": "float32" if settings.flag("residual_in_fp32", True) else "compute",
        "layers": [{"sublayers": sublayers, "repeat": layers}],
    }


def _sublayers(
    norms: dict[str, Any], mixer: dict[str, Any], attention: dict[str, Any] | None, ffn_size: int
) -> list[dict[str, Any]]:
    sublayers = [{"type": "rodimus", **mixer, **norms}]
    if attention is not None:
        sublayers.append({"type": "shared_key_attention", "residual": "two_hop", **attention, **norms})
        sublayers.append({"type": "glu", "intermediate_size": ffn_size, "activation": "silu", **norms})
    return sublayers


def _plus(settings: Settings, default: str) -> bool:
    kind = settings.values.get("block_type", default)
    if kind not in ("rodimus", "rodimus_plus"):
        raise settings.problem("block_type", "supported: 'rodimus' or 'rodimus_plus'")
    return bool(kind == "rodimus_plus")


def _rank(settings: Settings, width: int) -> int:
    """Rank of the values' gate; "auto" derives it from the width."""
    if settings.values.get("input_gate_low_rank", "auto") in ("auto", None):
        return max(width // 64, 16)
    return settings.integer("input_gate_low_rank")


def _aligned(ratio: float, width: int) -> int:
    return -(-int(ratio * width) // FFN_MULTIPLE) * FFN_MULTIPLE


def _fla_model(settings: Settings) -> dict[str, Any]:
    width = settings.integer("hidden_size")
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("norm_eps", 1e-5)}
    mixer = {
        "state_size": settings.integer("expand_ratio", 64),
        "input_gate_rank": _rank(settings, width),
        "conv_width": settings.integer("conv_size", 4),
    }
    attention = None
    if _plus(settings, "rodimus_plus"):
        attention = _fla_attention(settings.table("ska_attn"))
    size = settings.integer(
        "intermediate_size", _aligned(settings.number("hidden_ratio", DEFAULT_RATIO, maximum=MAX_RATIO), width)
    )
    sublayers = _sublayers(norms, mixer, attention, size)
    table = _model(settings, sublayers, width=width, layers=settings.integer("num_hidden_layers"))
    return table | norms | {"tie_embeddings": settings.flag("tie_word_embeddings", True)}


def _fla_attention(table: Settings) -> dict[str, Any]:
    table.check_fixed({"qkv_bias": (False,), "qk_norm": (False,)}, FLA_PLUS.title)
    if "window_size" in table.values and not table.has("window_size"):
        raise table.problem("window_size", "attention to all earlier tokens is not supported; set a window")
    return {
        "num_heads": table.integer("num_heads"),
        "window": table.integer("window_size", 1024),
        "rope_base": table.number("rope_theta", 10000.0),
    }


def _codefuse_model(settings: Settings) -> dict[str, Any]:
    width = settings.integer("d_model")
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("norm_epsilon", 1e-5)}
    flow = settings.table("mixer_cfg")
    flow.check_fixed({"expand_ratio": (2, 2.0), "normalize_epsilon": (None, 1e-12)}, CODEFUSE.title)
    mixer = {
        "state_size": flow.integer("mem_size", 64),
        "input_gate_rank": _rank(flow, width),
        "conv_width": flow.integer("d_conv", 4),
    }
    attention, size = None, 0
    if _plus(settings, "rodimus"):
        attention_settings = settings.table("attn_cfg")
        attention = _codefuse_attention(attention_settings, width)
        size = _aligned(attention_settings.number("ffn_expand_ratio", DEFAULT_RATIO, maximum=MAX_RATIO), width)
    sublayers = _sublayers(norms, mixer, attention, size)
    table = _model(settings, sublayers, width=width, layers=settings.integer("n_layer"))
    scale = math.sqrt(mixer["state_size"]) if settings.flag("use_scale_embedding", False) else 1.0
    tied = settings.flag("tie_word_embeddings", False)
    depth = "scaled_by_depth" if settings.flag("rescale_prenorm_residual", True) else "plain"
    return table | norms | {"embedding_scale": scale, "tie_embeddings": tied, "output_init": depth}


def _codefuse_attention(table: Settings, width: int) -> dict[str, Any]:
    heads = table.integer("num_heads", max(1, width // 128))
    fixed = {
        "num_heads_k": (1,),
        "num_heads_v": (heads,),
        "softmax_scale": (None,),
        "rotary_emb_dim": (-1, width // heads),
        "rotary_emb_scale_base": (None,),
        "rotary_emb_interleaved": (False,),
    }
    table.check_fixed(fixed, CODEFUSE_PLUS.title)
    for key in ("num_heads_k", "num_heads_v"):
        table.integer(key)  # its class has no default
    # The class attends to half of window_size earlier keys and to the token's own.
    window = table.integer("window_size") // 2 + 1
    return {"num_heads": heads, "window": window, "rope_base": table.number("rotary_emb_base", 10000.0)}


def _fla_settings(model: ModelConfig) -> dict[str, Any]:
    mixer, *rest = (sublayer.model_dump() for sublayer in model.layers[0].sublayers)
    wide = model.residual_dtype == "float32"
    values = {
        "block_type": "rodimus_plus" if rest else "rodimus",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "expand_ratio": mixer["state_size"],
        "input_gate_low_rank": mixer["input_gate_rank"] or "auto",
        "conv_size": mixer["conv_width"],
        "norm_eps": model.norm_eps,
        "residual_in_fp32": wide,
        "block_residual_in_fp32": wide,  # the class reads one key in some places and the other elsewhere
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
    }
    if rest:
        attention, glu = rest
        values["ska_attn"] = {
            "num_heads": attention["num_heads"],
            "window_size": attention["window"],
            "rope_theta": attention["rope_base"],
            "qkv_bias": False,
            "qk_norm": False,
        }
        values["intermediate_size"] = glu["intermediate_size"]
    return values


def _codefuse_settings(model: ModelConfig) -> dict[str, Any]:
    mixer, *rest = (sublayer.model_dump() for sublayer in model.layers[0].sublayers)
    values = {
        "block_type": "rodimus_plus" if rest else "rodimus",
        "d_model": model.hidden_size,
        "n_layer": model.num_layers,
        "norm_epsilon": model.norm_eps,
        "residual_in_fp32": model.residual_dtype == "float32",
        "rescale_prenorm_residual": model.output_init == "scaled_by_depth",
        "use_scale_embedding": model.embedding_scale != 1.0,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "mixer_cfg": {
            "d_conv": mixer["conv_width"],
            "expand_ratio": 2,
            "mem_size": mixer["state_size"],
            "input_gate_low_rank": mixer["input_gate_rank"] or "auto",
        },
    }
    if rest:
        attention, glu = rest
        if attention["window"] == 1:
            raise ConfigError(
                f"model.layers.0.sublayers.1.window = 1: {CODEFUSE_PLUS.title} attends to at least 2 tokens; use "
                "--format fla"
            )
        values["attn_cfg"] = {
            "num_heads": attention["num_heads"],
            "num_heads_k": 1,
            "num_heads_v": attention["num_heads"],
            "window_size": 2 * (attention["window"] - 1),
            "rotary_emb_base": attention["rope_base"],
            "ffn_expand_ratio": glu["intermediate_size"] / model.hidden_size,
        }
    return values


_FLA_MIXER = (
    norm("0.norm.weight", "mixer_norm.weight"),
    Link("0.mixer.fc.weight", ("mixer.up_proj.weight", "mixer.gate_proj.weight"), (0, 1)),
    Link("0.mixer.conv.weight", ("mixer.short_conv.weight",), extra_dim=True),
    Link("0.mixer.conv.bias", ("mixer.short_conv.bias",)),
    Link("0.mixer.qk", ("mixer.q_proj.weight", "mixer.k_proj.weight"), (0, 1)),
    Link("0.mixer.gates", ("mixer.g_gate_proj.weight", "mixer.tau_gate_proj.weight"), (0, 1)),
    Link("0.mixer.full_precision.gate_bias", ("mixer.g_gate_proj.bias", "mixer.tau_gate_proj.bias"), (0, 1)),
    Link("0.mixer.full_precision.feed_through", ("mixer.residual_weight",)),
    Link("0.mixer.input_gate_down", ("mixer.i_gate_proj.0.weight",)),
    Link("0.mixer.input_gate_up", ("mixer.i_gate_proj.1.weight",)),
    Link("0.mixer.input_gate_bias", ("mixer.i_gate_proj.1.bias",)),
    Link("0.mixer.out.norm_weight", ("mixer.activation_norm.weight",)),
    Link("0.mixer.out.weight", ("mixer.down_proj.weight",)),
)
_FLA_PLUS = (
    norm("1.norm.weight", "ska_attn_norm.weight"),
    Link("1.mixer.qv.weight", ("ska_attn.q_proj.weight", "ska_attn.v_proj.weight"), (0, 1)),
    Link("1.mixer.key", ("ska_attn.k_proj.weight",)),
    Link("1.mixer.out.weight", ("ska_attn.o_proj.weight",)),
    norm("2.norm.weight", "mlp_norm.weight"),
    Link("2.mixer.up.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (0, 1)),
    Link("2.mixer.down.weight", ("mlp.down_proj.weight",)),
)
_INNER = "mixer.inner_mixer."
_CODEFUSE_MIXER = (
    norm("0.norm.weight", "mixer_norm.weight"),
    Link("0.mixer.fc.weight", ("mixer.fc.weight",), (0, 1)),
    Link("0.mixer.conv.weight", (f"{_INNER}short_conv.conv1d.weight",), extra_dim=True),
    Link("0.mixer.conv.bias", (f"{_INNER}short_conv.conv1d.bias",)),
    Link("0.mixer.qk", (f"{_INNER}in_proj.weight",)),
    Link("0.mixer.gates", (f"{_INNER}mem_gate_proj.weight",)),
    Link("0.mixer.full_precision.gate_bias", (f"{_INNER}mem_gate_proj.bias",)),
    Link("0.mixer.full_precision.feed_through", (f"{_INNER}residual_weight",)),
    Link("0.mixer.input_gate_down", (f"{_INNER}ch_gate_proj.0.weight",)),
    Link("0.mixer.input_gate_up", (f"{_INNER}ch_gate_proj.1.weight",)),
    Link("0.mixer.input_gate_bias", (f"{_INNER}ch_gate_proj.1.bias",)),
    Link("0.mixer.out.norm_weight", ("mixer.act_norm.weight",)),
    Link("0.mixer.out.weight", ("mixer.out_proj.weight",)),
)
_CODEFUSE_PLUS = (
    norm("1.norm.weight", "attn_norm.weight"),
    Link("1.mixer.qv.weight", ("attn.q_proj.weight", "attn.v_proj.weight"), (0, 1)),
    Link("1.mixer.key", ("attn.k_proj.weight",)),
    Link("1.mixer.out.weight", ("attn.out_proj.weight",)),
    norm("2.norm.weight", "ffn_norm.weight"),
    # Its first half is linear and the second is the gate; our order is the reverse.
    Link("2.mixer.up.weight", ("ffn.fc.weight",), (1, 0)),
    Link("2.mixer.down.weight", ("ffn.out_proj.weight",)),
)
_PLUS = ("rodimus", "shared_key_attention", "glu")

FLA = CheckpointLayout(
    format="fla",
    architecture="RodimusForCausalLM",
    model_type="rodimus",
    sublayers=("rodimus",),
    required_keys=("hidden_size",),
    layers="model.layers.{}.",
    block=_FLA_MIXER,
    model=(
        Link("embedding.weight", ("model.embeddings.weight",)),
        norm("norm.weight", "model.norm.weight"),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={"hidden_act": ("swish",), "use_short_conv": (True,), "k_norm_eps": (None, 1e-12), "attn": (None,)},
    to_model=_fla_model,
    to_settings=_fla_settings,
)
FLA_PLUS = FLA._replace(sublayers=_PLUS, block=(*_FLA_MIXER, *_FLA_PLUS))

CODEFUSE = CheckpointLayout(
    format="codefuse",
    architecture="RodimusForCausalLM",
    model_type="rodimus",
    sublayers=("rodimus",),
    required_keys=("d_model", "n_layer"),
    layers="model.layers.{}.",
    block=_CODEFUSE_MIXER,
    model=(
        Link("embedding.weight", ("model.embeddings.weight",)),
        norm("norm.weight", "model.norm_f.weight"),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={"use_norm_embedding": (False,)},
    to_model=_codefuse_model,
    to_settings=_codefuse_settings,
)
CODEFUSE_PLUS = CODEFUSE._replace(sublayers=_PLUS, block=(*_CODEFUSE_MIXER, *_CODEFUSE_PLUS))
