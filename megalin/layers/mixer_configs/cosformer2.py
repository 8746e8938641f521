"""Config of cosFormer2's token mixer."""

from __future__ import annotations

from typing import Literal

from megalin.layers.linear_attention_config import LowRankGatedConfig
from megalin.ops.choices import LRPEForm


class CosFormer2Config(LowRankGatedConfig):
    """cosFormer2's token mixer. The model's embedded tokens pass through TPE, which has as many decays as a head has
    channels and the chunk size of the first such sub-layer."""

    type: Literal["cosformer2"] = "cosformer2"
    """This mixer."""
    lrpe: LRPEForm = "cosine"
    """Learnable relative positions on queries and keys."""


CONFIG = CosFormer2Config
