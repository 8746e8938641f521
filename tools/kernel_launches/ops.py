"""Kernels of each op, by the op's name in `tools/benchmark_ops.py --ops`."""

from __future__ import annotations

OPS: dict[str, tuple[str, ...]] = {
    "adamw_update": ("adamw_update",),
    "decay_scan": ("scans.fixed_decay_sweep",),
    "decay_state": ("scans.fixed_decay_state", "scans.fixed_decay_sweep.block_state_kernel"),
    "decode_steps": ("decoding", "scans.fixed_decay_step", "scans.vector_decay_step"),
    "forget_gate_scan": ("scans.forget_gate_steep",),
    "forget_gates": ("gates.forget_gates",),
    "gated_product": ("gates.gated_product", "quantized_gated_product"),
    "gated_squares": ("norms.gated_squares",),
    "layer_norm": ("norms.layer_norm",),
    "linear_cross_entropy": ("cross_entropy",),
    "low_rank_gate": ("gates.low_rank_gate",),
    "lrpe_states": ("positions.lrpe_states",),
    "max_norm": ("norms.max_norm",),
    "rms_norm": ("norms.rms_norm", "dispatch.column_sums"),
    "rope": ("positions.rope",),
    "scalar_decay_scan": ("scans.scalar_decay",),
    "scaled_heads": ("gates.scaled_heads",),
    "scaled_linear": ("scaled_linear",),
    "selective_scan": ("scans.selective_scan",),
    "short_conv": ("scans.short_conv",),
    "silu_lrpe": ("positions.silu_lrpe",),
    "skip_gated_squares": ("norms.skip_gated_squares",),
    "srmsnorm": ("norms.srmsnorm",),
    "step_record": ("step_record",),
    "tpe": ("scans.tpe",),
    "vector_decay_scan": ("scans.vector_decay_chunk", "scans.vector_decay_mild", "scans.vector_decay_sweep"),
}
"""Op -> beginnings of the names of its kernels."""


def is_of_op(kernel: str, op: str) -> bool:
    """Whether an op launches a kernel."""
    return kernel.startswith(OPS[op])
