"""TransNormerLLM's token mixer: gated linear attention with a fixed decay and a full-rank linear gate.

Without decay and gate it is TransNormer's NormAttention.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megalin.layers.decay import DecayKind
from megalin.layers.linear_attention import LinearAttention, PositionedAttentionConfig
from megalin.layers.mixers.base import BuildContext
from megalin.parallel.linear import ColumnParallelLinear


class TransNormer(LinearAttention):
    """[q | k | v | u] = x W_qkvu; y = (SRMSNorm(scan(silu(q), silu(k), v)) * u) W_o (TransNormerLLM eq. 3-4)."""

    projects_linearly = True

    def __init__(self, config: TransNormerConfig, scope: BuildContext) -> None:
        decay = None if config.decay == "none" else config.decay
        super().__init__(config, scope, decay=decay, gated=config.gate != "none")
        width, tp, std, name = scope.hidden_size, scope.tp, scope.init_std, "model.hidden_size"
        if self.gated:
            self.qkvu = ColumnParallelLinear(width, width, parts=4, tp=tp, std=std, name=name)
        else:
            self.qkv = ColumnParallelLinear(width, width, parts=3, tp=tp, std=std, name=name)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._projection()(x, gather_input=True, split_parts=False), None

    def projection_flops(self) -> int:
        return self._projection().flops()

    def _projection(self) -> ColumnParallelLinear:
        return self.qkvu if self.gated else self.qkv


class TransNormerConfig(PositionedAttentionConfig):
    """TransNormerLLM's token mixer."""

    type: Literal["transnormer"] = "transnormer"
    """This mixer."""
    decay: DecayKind = "alibi"
    """Table of fixed decays. alibi: the released checkpoints'. paper: the paper's eq. 2. alibi_no_temperature,
    no_temperature: these two without the layer factor 1 - l / L (Table 4). none: no decay (Table 3, LRPE)."""
    gate: Literal["linear", "none"] = "linear"
    """Output gate. linear: u = x W_u. none: y = SRMSNorm(scan) W_o, without W_u's D^2 parameters (Table 5)."""

    def build(self, scope: BuildContext) -> TransNormer:
        return TransNormer(self, scope)


CONFIG = TransNormerConfig
