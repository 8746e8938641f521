"""Config of TNL's token mixer."""

from __future__ import annotations

from typing import Literal

from megalin.layers.choices import DecayKind
from megalin.layers.linear_attention_config import LowRankGatedConfig, PositionedAttentionConfig


class TNLConfig(LowRankGatedConfig, PositionedAttentionConfig):
    """TNL's token mixer."""

    type: Literal["tnl"] = "tnl"
    """This mixer."""
    decay: DecayKind = "alibi"
    """Table of fixed decays. alibi: the released checkpoints'. paper: TransNormerLLM eq. 2. alibi_no_temperature,
    no_temperature: these two without the layer factor 1 - l / L (TransNormerLLM Table 4). none: no decay (its Table
    3)."""


CONFIG = TNLConfig
