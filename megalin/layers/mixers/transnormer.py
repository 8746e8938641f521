"""TransNormerLLM's token mixer: gated linear attention with a fixed decay and a full-rank linear gate."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megalin.layers.decay import DecayKind
from megalin.layers.linear_attention import LinearAttention, LinearAttentionConfig
from megalin.layers.mixers.base import BuildContext
from megalin.parallel.linear import ColumnParallelLinear


class TransNormer(LinearAttention):
    """[q | k | v | u] = x W_qkvu; y = (SRMSNorm(scan(silu(q), silu(k), v)) * u) W_o (TransNormerLLM eq. 3-4)."""

    projects_linearly = True

    def __init__(self, config: TransNormerConfig, scope: BuildContext) -> None:
        super().__init__(config, scope, decay=config.decay)
        width = scope.hidden_size
        self.qkvu = ColumnParallelLinear(
            width, width, parts=4, tp=scope.tp, std=scope.init_std, name="model.hidden_size"
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.qkvu(x, gather_input=True, split_parts=False), None

    def projection_flops(self) -> int:
        return self.qkvu.flops()


class TransNormerConfig(LinearAttentionConfig):
    """TransNormerLLM's token mixer."""

    type: Literal["transnormer"] = "transnormer"
    """This mixer."""
    decay: DecayKind = "alibi"
    """Table of fixed decays. alibi: the released checkpoints'. paper: the paper's eq. 2."""

    def build(self, scope: BuildContext) -> TransNormer:
        return TransNormer(self, scope)


CONFIG = TransNormerConfig
