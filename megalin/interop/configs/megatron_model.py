"""A Megatron-LM transformer as a decoder of softmax attention and a channel mixer; notes what has no equivalent."""

from __future__ import annotations

import re
from typing import Any

from megalin.interop.configs.flags import Flags
from megalin.interop.configs.imported import ImportedConfig

_LAYERS = "model.layers"
_NORMS = ("layernorm", "rmsnorm")
_OF_LAYERS = (
    "--num-layers",
    "--num-attention-heads",
    "--group-query-attention",
    "--num-query-groups",
    "--num-key-value-heads",
    "--rotary-base",
    "--rotary-position-embeddings-theta",
    "--position-embedding-type",
    "--use-rotary-position-embeddings",
    "--no-position-embedding",
    "--ffn-hidden-size",
    "--swiglu",
    "--squared-relu",
    "--openai-gelu",
    "--activation-func",
    "--no-bias-gelu-fusion",
    "--disable-bias-linear",
    "--add-qkv-bias",
    "--kv-channels",
    "--qk-layernorm",
    "--window-size",
)
_DROPOUT = 0.1
"""Megatron-LM's default rate of both kinds of dropout."""


def add_model(flags: Flags, imported: ImportedConfig) -> None:
    """Reads the flags of the network into the table `model`."""
    hidden = flags.integer("--hidden-size", "model.hidden_size")
    heads, layers = (flags.integer(name, _LAYERS) for name in ("--num-attention-heads", "--num-layers"))
    for name in ("--vocab-size", "--padded-vocab-size"):
        if (value := flags.integer(name, "model.vocab_size")) is not None:
            imported.set("model.vocab_size", value, name)
    imported.hint("model.vocab_size", "Megatron-LM reads it from the tokenizer: the number of its ids")
    if hidden is not None:
        imported.set("model.hidden_size", hidden, "--hidden-size")
    imported.set("model.tie_embeddings", not flags.has("--untie-embeddings-and-output-weights"), _untied(flags))
    norm = _norm(flags, imported)
    for key, value in norm.items():
        name = flags.given("--normalization", "--norm-epsilon", "--layernorm-epsilon")
        imported.set(f"model.{key}", value, name or "Megatron-LM's default norm")
    if (std := flags.number("--init-method-std", "model.init_std")) is not None:
        imported.set("model.init_std", std, "--init-method-std")
    imported.set("model.output_init", "scaled_by_depth", "Megatron-LM's scaled initialisation of output layers")
    if flags.has("--fp32-residual-connection"):
        imported.set("model.residual_dtype", "float32", "--fp32-residual-connection")
    attention = _attention(flags, imported, hidden, heads) | _variants(flags, imported, norm["norm"]) | norm
    mixer = _channel_mixer(flags, imported, hidden) | norm
    _dropout(flags, imported)
    _report_other_kinds(flags, imported)
    if layers is not None and "num_heads" in attention and "intermediate_size" in mixer:
        block = {"repeat": layers, "sublayers": [attention, mixer]}
        imported.set(_LAYERS, [block], flags.given(*_OF_LAYERS))
    else:
        imported.hint(_LAYERS, "needs --num-layers, --hidden-size and --num-attention-heads")


def _untied(flags: Flags) -> str:
    name = "--untie-embeddings-and-output-weights"
    return name if flags.has(name) else f"no {name}"


def _norm(flags: Flags, imported: ImportedConfig) -> dict[str, Any]:
    kind, eps = flags.text("--normalization", "LayerNorm"), flags.number("--norm-epsilon")
    norm = kind.lower()  # Megatron-DeepSpeed writes them in lower case
    old = flags.number("--layernorm-epsilon")
    eps = old if eps is None else eps
    if norm not in _NORMS:
        imported.note("differs", f"--normalization {kind}", "layernorm instead")
        norm = "layernorm"
    return {"norm": norm, "norm_eps": 1e-5 if eps is None else eps}


def _attention(flags: Flags, imported: ImportedConfig, hidden: int | None, heads: int | None) -> dict[str, Any]:
    sublayer: dict[str, Any] = {"type": "softmax"}
    if heads is not None:
        sublayer["num_heads"] = heads
    groups, old = (flags.integer(name, _LAYERS) for name in ("--num-query-groups", "--num-key-value-heads"))
    groups = old if groups is None else groups
    if flags.has("--group-query-attention") or old is not None:
        sublayer["num_key_value_heads"] = groups or 1
    elif groups is not None:
        text = "Megatron-LM reads it only together with --group-query-attention"
        imported.note("no effect", "--num-query-groups", text)
    base = flags.number("--rotary-base", _LAYERS)
    old_base = flags.number("--rotary-position-embeddings-theta", _LAYERS)
    if (base := old_base if base is None else base) is not None:
        sublayer["rope_base"] = base
    width = flags.integer("--kv-channels", _LAYERS)
    if width is not None and heads and hidden is not None and width * heads != hidden:
        sublayer["head_dim"] = width
    kind = "rope" if flags.has("--use-rotary-position-embeddings") else "learned_absolute"
    kind = flags.text("--position-embedding-type", kind)
    if kind != "rope":
        imported.note("differs", f"--position-embedding-type {kind}", "positions are rotary")
    flags.has("--no-position-embedding")  # marks it as read: rotary models have no position table here
    percent = flags.number("--rotary-percent", _LAYERS)
    if percent not in (None, 1.0):
        imported.note("differs", f"--rotary-percent {percent}", "all channels of a head are rotated")
    biased, biased_inputs = not flags.has("--disable-bias-linear"), flags.has("--add-qkv-bias")
    if biased or biased_inputs:
        sublayer["qkv_bias"] = True
    if biased:
        sublayer["output_bias"] = True
    return sublayer


def _variants(flags: Flags, imported: ImportedConfig, norm: str) -> dict[str, Any]:
    """A window, and norms of queries and keys, which are of the model's kind in Megatron-LM."""
    variants: dict[str, Any] = {}
    if flags.has("--qk-layernorm") and norm == "rmsnorm":
        variants["qk_norm"] = True
    elif flags.has("--qk-layernorm"):
        imported.note("differs", "--qk-layernorm", "queries and keys have no norm; qk_norm is an RMSNorm")
    if flags.has("--window-size"):
        text = " ".join(flags.words("--window-size"))
        if sizes := re.fullmatch(r"\(?(\d+)\D+0\)?", text):
            variants["window"] = int(sizes[1]) + 1  # Megatron-LM counts the tokens before the token itself
        else:
            imported.note("differs", f"--window-size {text}", "attention to all earlier tokens")
    return variants


def _channel_mixer(flags: Flags, imported: ImportedConfig, hidden: int | None) -> dict[str, Any]:
    """The MLP, or the GLU of two thirds of its width in multiples of 64."""
    biased = not flags.has("--disable-bias-linear")
    width, kind = flags.integer("--ffn-hidden-size", _LAYERS), flags.text("--activation-func")
    gated, quick = flags.has("--swiglu") or kind == "swiglu", flags.has("--quick-geglu")
    plain = _plain_activation(flags, biased=biased)
    if kind not in ("", "gelu", "swiglu"):
        imported.note("differs", f"--activation-func {kind}", f"{'silu' if gated or quick else plain} instead")
    if quick:
        imported.note("differs", "--quick-geglu", "a SwiGLU of the same width")
    if width is None and hidden is not None:
        width = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
    sublayer: dict[str, Any] = {"type": "ffn", "activation": plain}
    if gated or quick:
        sublayer = {"type": "glu", "activation": "silu"}
    if width is not None:
        sublayer["intermediate_size"] = width
    return sublayer | {"bias": biased}


def _plain_activation(flags: Flags, *, biased: bool) -> str:
    """Activation of an MLP without a gate; the kernel that joins GELU with the bias has the approximation by tanh."""
    squared, approximate = flags.has("--squared-relu"), flags.has("--openai-gelu")
    fused = biased and not flags.has("--no-bias-gelu-fusion")
    if squared:
        return "squared_relu"
    return "gelu_tanh" if approximate or fused else "gelu"


def _dropout(flags: Flags, imported: ImportedConfig) -> None:
    """Sets dropout, which Megatron-LM applies at one rate to the embeddings and the outputs of sub-layers, and notes
    that of attention probabilities."""
    rate = flags.number("--hidden-dropout", "model.hidden_dropout")
    source = "Megatron-LM's default --hidden-dropout" if rate is None else "--hidden-dropout"
    for key in ("model.hidden_dropout", "model.embedding_dropout"):
        imported.set(key, _DROPOUT if rate is None else rate, source)
    rate = flags.number("--attention-dropout", _LAYERS)
    if rate is None or rate > 0:
        key = f"--attention-dropout {_DROPOUT} (its default)" if rate is None else f"--attention-dropout {rate}"
        imported.note("differs", key, "attention probabilities have no dropout")


def _report_other_kinds(flags: Flags, imported: ImportedConfig) -> None:
    """Notes experts and hybrid patterns: the import is a dense transformer."""
    if flags.has("--num-experts"):
        experts = flags.text("--num-experts")
        imported.note("differs", f"--num-experts {experts}", "one dense network replaces the experts")
    for name in ("--hybrid-layer-pattern", "--hybrid-override-pattern", "--is-hybrid-model"):
        if flags.has(name):
            text = "write the pattern under model.layers, with mixers such as mamba2, softmax and glu"
            imported.note("not available", f"{name} {flags.text(name)}".strip(), text)
