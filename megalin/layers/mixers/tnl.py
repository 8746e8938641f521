"""TNL's token mixer: gated linear attention with a fixed decay and a low-rank sigmoid gate."""

from __future__ import annotations

from typing import Literal

from megalin.layers.decay import DecayKind
from megalin.layers.linear_attention import LowRankGatedAttention, LowRankGatedConfig, PositionedAttentionConfig
from megalin.layers.mixers.base import BuildContext


class TNL(LowRankGatedAttention):
    """y = (SRMSNorm(scan(silu(q), silu(k), v)) * G) W_o, G = sigmoid(x W_down W_up) of rank D / H.

    Source: the scaling-laws paper eq. 8-11, with the output projection that its tables count.
    """

    def __init__(self, config: TNLConfig, scope: BuildContext) -> None:
        super().__init__(config, scope, decay=None if config.decay == "none" else config.decay)


class TNLConfig(LowRankGatedConfig, PositionedAttentionConfig):
    """TNL's token mixer."""

    type: Literal["tnl"] = "tnl"
    """This mixer."""
    decay: DecayKind = "alibi"
    """Table of fixed decays. alibi: the released checkpoints'. paper: TransNormerLLM eq. 2. alibi_no_temperature,
    no_temperature: these two without the layer factor 1 - l / L (TransNormerLLM Table 4). none: no decay (its Table
    3)."""

    def build(self, scope: BuildContext) -> TNL:
        return TNL(self, scope)


CONFIG = TNLConfig
