"""Tensor maths without ranks, layers or configs: an op and its reference per file.

The public ops, for other people's models (docs/api.md). Each runs alone on tensors of any device, has gradients, and
chooses the fastest implementation that passes its self-test there (`backend="auto"`); `NAME_reference` is the same in
plain PyTorch. They are imported at their first use: `from megalin.ops import decay_scan`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalin.ops.attention.bidirectional import bidirectional_attention, bidirectional_attention_reference
    from megalin.ops.attention.causal import causal_attention
    from megalin.ops.attention.dense import dense_attention, dense_attention_reference
    from megalin.ops.attention.softmax import softmax_attention, softmax_attention_reference
    from megalin.ops.attention.window import window_attention, window_attention_reference
    from megalin.ops.gates.forget_gate_scan import forget_gate_scan, forget_gate_scan_reference
    from megalin.ops.gates.forget_gates import forget_gates, forget_gates_reference
    from megalin.ops.gates.gated_product import gated_product, gated_product_reference
    from megalin.ops.gates.low_rank_gate import low_rank_gate, low_rank_gate_reference
    from megalin.ops.norms.layer_norm import layer_norm, layer_norm_reference
    from megalin.ops.norms.max_norm import max_norm, max_norm_reference
    from megalin.ops.norms.rms_norm import rms_norm, rms_norm_reference
    from megalin.ops.norms.srmsnorm import srmsnorm, srmsnorm_reference
    from megalin.ops.positions.encodings import lrpe_cosine, lrpe_rotation, rope, rope_reference
    from megalin.ops.positions.silu_lrpe import silu_lrpe, silu_lrpe_reference
    from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_reference
    from megalin.ops.scans.fixed_decay_step import decay_step
    from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_reference, scalar_decay_step
    from megalin.ops.scans.selective_scan import selective_scan, selective_scan_reference, selective_step
    from megalin.ops.scans.short_conv import short_conv, short_conv_reference
    from megalin.ops.scans.tpe import tpe, tpe_reference, tpe_step
    from megalin.ops.scans.vector_decay import vector_decay_scan, vector_decay_scan_reference
    from megalin.ops.scans.vector_decay_step import vector_decay_step

__all__ = [
    "bidirectional_attention",
    "bidirectional_attention_reference",
    "causal_attention",
    "decay_scan",
    "decay_scan_reference",
    "decay_step",
    "dense_attention",
    "dense_attention_reference",
    "forget_gate_scan",
    "forget_gate_scan_reference",
    "forget_gates",
    "forget_gates_reference",
    "gated_product",
    "gated_product_reference",
    "layer_norm",
    "layer_norm_reference",
    "low_rank_gate",
    "low_rank_gate_reference",
    "lrpe_cosine",
    "lrpe_rotation",
    "max_norm",
    "max_norm_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_reference",
    "scalar_decay_scan",
    "scalar_decay_scan_reference",
    "scalar_decay_step",
    "selective_scan",
    "selective_scan_reference",
    "selective_step",
    "short_conv",
    "short_conv_reference",
    "silu_lrpe",
    "silu_lrpe_reference",
    "softmax_attention",
    "softmax_attention_reference",
    "srmsnorm",
    "srmsnorm_reference",
    "tpe",
    "tpe_reference",
    "tpe_step",
    "vector_decay_scan",
    "vector_decay_scan_reference",
    "vector_decay_step",
    "window_attention",
    "window_attention_reference",
]

_MODULES = {
    "attention.bidirectional": ("bidirectional_attention", "bidirectional_attention_reference"),
    "attention.causal": ("causal_attention",),
    "attention.dense": ("dense_attention", "dense_attention_reference"),
    "attention.softmax": ("softmax_attention", "softmax_attention_reference"),
    "attention.window": ("window_attention", "window_attention_reference"),
    "gates.forget_gate_scan": ("forget_gate_scan", "forget_gate_scan_reference"),
    "gates.forget_gates": ("forget_gates", "forget_gates_reference"),
    "gates.gated_product": ("gated_product", "gated_product_reference"),
    "gates.low_rank_gate": ("low_rank_gate", "low_rank_gate_reference"),
    "norms.layer_norm": ("layer_norm", "layer_norm_reference"),
    "norms.max_norm": ("max_norm", "max_norm_reference"),
    "norms.rms_norm": ("rms_norm", "rms_norm_reference"),
    "norms.srmsnorm": ("srmsnorm", "srmsnorm_reference"),
    "positions.encodings": ("lrpe_cosine", "lrpe_rotation", "rope", "rope_reference"),
    "positions.silu_lrpe": ("silu_lrpe", "silu_lrpe_reference"),
    "scans.fixed_decay": ("decay_scan", "decay_scan_reference"),
    "scans.fixed_decay_step": ("decay_step",),
    "scans.scalar_decay": ("scalar_decay_scan", "scalar_decay_scan_reference", "scalar_decay_step"),
    "scans.selective_scan": ("selective_scan", "selective_scan_reference", "selective_step"),
    "scans.short_conv": ("short_conv", "short_conv_reference"),
    "scans.tpe": ("tpe", "tpe_reference", "tpe_step"),
    "scans.vector_decay": ("vector_decay_scan", "vector_decay_scan_reference"),
    "scans.vector_decay_step": ("vector_decay_step",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'megalin.ops' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"megalin.ops.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
