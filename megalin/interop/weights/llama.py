"""The layouts of LLaMA, Mistral, Qwen2 and Qwen3 in transformers: names, config.json and supported variants.

The rows of queries and keys need no permutation: both sides rotate the halves of a head, not neighbouring pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, Literal

from megalin.interop.weights.layout import CheckpointLayout, Link, norm
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig

ROPE_BASE = 10000.0
_SILU = ("silu", "swish")
_FACTORS = {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"}


_ATTENTION_BIAS, _MLP_BIAS = "attention_bias", "mlp_bias"
"""Keys of biases: of all four projections of attention, and of all three of the GLU."""
_SLIDING_WINDOW, _USE_WINDOW, _FULL_LAYERS = "sliding_window", "use_sliding_window", "max_window_layers"
_LAYER_TYPES, _FULL, _SLIDING = "layer_types", "full_attention", "sliding_attention"


Windows = Callable[[Settings, int], list[int | None]]
"""(config.json, number of layers) -> `window` of each layer's attention."""


def _no_windows(_: Settings, layers: int) -> list[int | None]:
    return [None] * layers


def _one_window(settings: Settings, layers: int) -> list[int | None]:
    """Windows of Mistral, whose class ignores layer_types; null: none."""
    return [_window(settings)] * layers


def _window(settings: Settings) -> int | None:
    """Visible tokens, the token itself included, in transformers as here."""
    return settings.integer(_SLIDING_WINDOW) if settings.has(_SLIDING_WINDOW) else None


def _qwen_windows(settings: Settings, layers: int) -> list[int | None]:
    """Windows of the layers of layer_types, or else from max_window_layers on, if use_sliding_window turns them on."""
    window = _window(settings) if settings.flag(_USE_WINDOW, False) else None
    kinds = settings.values.get(_LAYER_TYPES)
    if kinds is None:
        first = settings.values.get(_FULL_LAYERS)
        if type(first) is not int:
            raise settings.problem(_FULL_LAYERS, "must be an integer")
        return [window if layer >= first else None for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise settings.problem(_LAYER_TYPES, f"must be a list of {layers} times {_FULL} or {_SLIDING}")
    if window is None and _SLIDING in kinds:
        raise settings.problem(_LAYER_TYPES, f"{_SLIDING} needs {_USE_WINDOW} = true and a {_SLIDING_WINDOW}")
    return [window if kind == _SLIDING else None for kind in kinds]


def _to_model(
    settings: Settings,
    *,
    keys: tuple[str, ...],
    windows: Windows = _no_windows,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> dict[str, Any]:
    """`keys`: those of biases that the class reads; `qkv_bias`: it always has them, on three projections."""
    width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_dim = settings.integer("head_dim", max(1, width // heads))
    norms = {"norm": "rmsnorm", "norm_eps": settings.number("rms_norm_eps", 1e-6)}
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
        "layers": [
            {"sublayers": [attention | {"window": window}, glu], "repeat": len(list(same))}
            for window, same in groupby(windows(settings, settings.integer("num_hidden_layers")))
        ],
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
    if table.number("partial_rotary_factor", 1.0) != 1.0:
        raise table.problem("partial_rotary_factor", "supported: 1.0, all channels of a head")
    scaling = {"type": kind, "factor": table.number("factor")}
    if kind == "llama3":
        scaling |= {ours: table.number(theirs) for ours, theirs in _FACTORS.items()}
        scaling["original_length"] = table.integer("original_max_position_embeddings")
    return scaling


def _windows_of(model: ModelConfig) -> list[int | None]:
    """The window of each layer."""
    return [block.sublayers[0].widest_window for _, block in model.blocks()]


def _mistral_settings(model: ModelConfig) -> dict[str, Any]:
    return {_SLIDING_WINDOW: _windows_of(model)[0]}


def _qwen_settings(model: ModelConfig) -> dict[str, Any]:
    windows = _windows_of(model)
    window = max((window for window in windows if window is not None), default=None)
    kinds = [_FULL if own is None else _SLIDING for own in windows]
    return {
        _USE_WINDOW: window is not None,
        _SLIDING_WINDOW: window,
        _FULL_LAYERS: kinds.index(_SLIDING) if _SLIDING in kinds else len(kinds),  # read by versions before 4.53
        _LAYER_TYPES: kinds,
    }


def _to_settings(
    model: ModelConfig,
    *,
    keys: tuple[str, ...],
    windows: Callable[[ModelConfig], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
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
        **windows(model),
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


def _variant(name: Literal["llama", "mistral", "qwen2", "qwen3"]) -> Callable[[ModelConfig], bool]:
    """Whether the biases, norms and windows of a model's attention are closest to this class."""

    def fits(model: ModelConfig) -> bool:
        attention = model.layers[0].sublayers[0].model_dump()
        if attention["qk_norm"]:
            return name == "qwen3"
        if attention["qkv_bias"] and not attention["output_bias"]:
            return name == "qwen2"
        return name == ("llama" if _windows_of(model) == [None] * model.num_layers else "mistral")

    return fits


_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""Defaults of LlamaConfig in transformers 5.24; those of the other classes are next to them."""
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
    defaults=_SIZES,
    fits=_variant("llama"),
)
MISTRAL = LLAMA._replace(
    architecture="MistralForCausalLM",
    model_type="mistral",
    to_model=partial(_to_model, keys=(), windows=_one_window),
    to_settings=partial(_to_settings, keys=(), windows=_mistral_settings),
    defaults=_SIZES
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        _SLIDING_WINDOW: 4096,
    },
    fits=_variant("mistral"),
)
QWEN2 = LLAMA._replace(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    to_model=partial(_to_model, keys=(), windows=_qwen_windows, qkv_bias=True),
    to_settings=partial(_to_settings, keys=(), windows=_qwen_settings),
    defaults=_SIZES
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        _SLIDING_WINDOW: 4096,
        _FULL_LAYERS: 28,
    },
    fits=_variant("qwen2"),
)
QWEN3 = QWEN2._replace(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    to_model=partial(_to_model, keys=(_ATTENTION_BIAS,), windows=_qwen_windows, qk_norm=True),
    to_settings=partial(_to_settings, keys=(_ATTENTION_BIAS,), windows=_qwen_settings),
    defaults={**QWEN2.defaults, "head_dim": 128},
    fits=_variant("qwen3"),
)
