"""TNL's token mixer: gated linear attention with a fixed decay and a low-rank sigmoid gate."""

from __future__ import annotations

from megalin.layers.linear_attention import LowRankGatedAttention
from megalin.layers.mixer_configs.tnl import TNLConfig
from megalin.layers.mixers.base import BuildContext


class TNL(LowRankGatedAttention):
    """y = (SRMSNorm(scan(silu(q), silu(k), v)) * G) W_o, G = sigmoid(x W_down W_up) of rank D / H.

    Source: the scaling-laws paper eq. 8-11, with the output projection that its tables count.
    """

    def __init__(self, config: TNLConfig, scope: BuildContext) -> None:
        super().__init__(config, scope, decay=None if config.decay == "none" else config.decay)


MIXER = TNL
