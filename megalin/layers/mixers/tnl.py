"""TNL's token mixer: gated linear attention with a fixed decay and a low-rank sigmoid gate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megalin.layers.decay import DecayKind
from megalin.layers.linear_attention import LinearAttention, LinearAttentionConfig, Projections
from megalin.layers.mixers.base import BuildScope
from megalin.parallel.linear import ColumnParallelLinear, LowRankLinear


class TNL(LinearAttention):
    """y = (SRMSNorm(scan(silu(q), silu(k), v)) * G) W_o, G = sigmoid(x W_down W_up) of rank D / H.

    Source: the scaling-laws paper eq. 8-11, with the output projection that its tables count.
    """

    def __init__(self, config: TNLConfig, scope: BuildScope) -> None:
        super().__init__(config, scope, decay=config.decay)
        width, name = scope.hidden_size, "model.hidden_size"
        self.qkv = ColumnParallelLinear(width, width, parts=3, tp=scope.tp, std=scope.init_std, name=name)
        self.gate = LowRankLinear(width, self.head_dim, width, tp=scope.tp, std=scope.init_std, name=name)

    def project(self, x: Tensor) -> Projections:
        q, k, v = self.qkv(x)
        return Projections(q, k, v, torch.sigmoid(self.gate(x)))

    def projection_flops(self) -> int:
        return self.qkv.flops() + self.gate.flops()


class TNLConfig(LinearAttentionConfig):
    """TNL's token mixer."""

    type: Literal["tnl"] = "tnl"
    """This mixer."""
    decay: DecayKind = "alibi"
    """Which table of fixed decays (models.md 2.1)."""

    def build(self, scope: BuildScope) -> TNL:
        return TNL(self, scope)


CONFIG = TNLConfig
