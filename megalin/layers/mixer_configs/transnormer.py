"""Config of TransNormerLLM's token mixer."""

from __future__ import annotations

from typing import Literal

from megalin.layers.choices import DecayKind
from megalin.layers.linear_attention_config import PositionedAttentionConfig


class TransNormerConfig(PositionedAttentionConfig):
    """TransNormerLLM's token mixer."""

    type: Literal["transnormer"] = "transnormer"
    """This mixer."""
    decay: DecayKind = "alibi"
    """Table of fixed decays. alibi: the released checkpoints'. paper: the paper's eq. 2. alibi_no_temperature,
    no_temperature: these two without the layer factor 1 - l / L (Table 4). none: no decay (Table 3, LRPE)."""
    gate: Literal["linear", "none"] = "linear"
    """Output gate. linear: u = x W_u. none: y = SRMSNorm(scan) W_o, without W_u's D^2 parameters (Table 5)."""


CONFIG = TransNormerConfig
