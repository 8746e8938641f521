"""The layout of the released TransNormerLLM: names, config.json, and the variants that our mixers support."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from megalin.errors import ConfigError
from megalin.interop.weights.layout import CheckpointLayout, Link
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig

NORMS = {"norm": "srmsnorm", "norm_eps": 1e-6}
"""The norm of its code in fp32 and bf16; config.json has no key for it."""


def _to_model(settings: Settings) -> dict[str, Any]:
    width, layers = settings.integer("decoder_embed_dim"), settings.integer("decoder_layers")
    if settings.integer("hidden_dim", width) != width:
        raise settings.problem("hidden_dim", f"supported: decoder_embed_dim = {width}")
    heads = settings.integer("decoder_attention_heads")
    glu_size = width if settings.values.get("glu_dim") == -1 else settings.integer("glu_dim")
    glu = {"type": "glu", "intermediate_size": glu_size, **NORMS}
    blocks = []
    for with_lrpe, same in groupby(_lrpe(settings, layers)):
        attention = {"type": "transnormer", "num_heads": heads, "lrpe": "cosine" if with_lrpe else None, **NORMS}
        blocks.append({"sublayers": [attention, glu], "repeat": len(list(same))})
    scaled = not settings.flag("no_scale_embedding", False)
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": width,
        "embedding_scale": math.sqrt(width) if scaled else 1.0,
        "tie_embeddings": settings.flag("tie_word_embeddings", True),
        "init_std": settings.number("init_std", 0.02),
        "layers": blocks,
        **NORMS,
    }


def _lrpe(settings: Settings, layers: int) -> list[bool]:
    """True for each layer that encodes positions."""
    chosen = settings.values.get("linear_use_lrpe_list")
    if not isinstance(chosen, list) or len(chosen) != layers or any(item not in (0, 1) for item in chosen):
        raise settings.problem("linear_use_lrpe_list", f"must be a list of decoder_layers = {layers} zeros and ones")
    return [bool(item) for item in chosen]


def _to_settings(model: ModelConfig) -> dict[str, Any]:
    if model.num_layers == 1:
        raise ConfigError(
            "model.layers has one block, for which the released TransNormerLLM divides by zero; use at least two"
        )
    attention, glu = (sublayer.model_dump() for sublayer in model.layers[0].sublayers)
    lrpe = [int(block.sublayers[0].model_dump()["lrpe"] is not None) for _, block in model.blocks()]
    return {
        "decoder_embed_dim": model.hidden_size,
        "hidden_dim": model.hidden_size,
        "decoder_layers": model.num_layers,
        "decoder_attention_heads": attention["num_heads"],
        "glu_dim": glu["intermediate_size"],
        "linear_use_lrpe_list": lrpe,
        "no_scale_embedding": model.embedding_scale == 1.0,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "init_std": model.init_std,
    }


TRANSNORMERLLM = CheckpointLayout(
    format="opennlplab",
    architecture="TransnormerForCausalLM",
    model_type="transnormer",
    sublayers=("transnormer", "glu"),
    required_keys=(),
    layers="model.layers.{}.",
    block=(
        Link("0.mixer.full_precision.theta", ("token_mixer.lrpe.theta",), extra_dim=True, absent="skip"),
        Link("0.mixer.qkvu.weight", ("token_mixer.qkvu_proj.weight",), (0, 1, 2, 3)),
        Link("0.mixer.out.weight", ("token_mixer.out_proj.weight",)),
        Link("1.mixer.up.weight", ("channel_mixer.l1.weight", "channel_mixer.l2.weight"), (0, 1)),
        Link("1.mixer.down.weight", ("channel_mixer.l3.weight",)),
    ),
    model=(
        Link("embedding.weight", ("model.embed_tokens.weight",)),
        Link("head.weight", ("lm_head.weight",), absent="skip"),
    ),
    fixed={"norm_type": ("simplermsnorm",), "linear_act_fun": ("silu", "swish"), "bias": (False,)},
    to_model=_to_model,
    to_settings=_to_settings,
)
