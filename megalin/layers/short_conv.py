"""Short convolution as a layer, its channels sharded over the tensor-parallel axis."""

from __future__ import annotations

import math

from torch import Tensor, nn

from megalin.ops.scans.short_conv import ShortConvOutput, short_conv
from megalin.parallel.initialisation import Initializer, uniform
from megalin.parallel.tensor_parallel import TensorParallel, local


class ShortConv(nn.Module):
    """silu(conv(x) + bias), depthwise and causal over `taps` tokens; weight [D, taps], bias [D], channels sharded."""

    def __init__(self, width: int, taps: int, *, tp: TensorParallel, name: str) -> None:
        """Raises ConfigError where `width`, called `name` in the message, does not divide."""
        super().__init__()
        tp.divide(width, name)
        self.taps = taps
        self.weight = tp.parameter(width, taps, shard_dim=0)
        self.bias = tp.parameter(width, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws both uniformly within 1 / sqrt(taps), as torch's convolutions do."""
        bound = 1.0 / math.sqrt(self.taps)
        initializer(self.weight, "weight", uniform(bound))
        initializer(self.bias, "bias", uniform(bound))

    def forward(self, x: Tensor, *, state: Tensor | None, document_ids: Tensor | None) -> ShortConvOutput:
        """x [B, T, D/tp], state [B, taps - 1, D/tp]."""
        return short_conv(x, local(self.weight), local(self.bias), state=state, document_ids=document_ids)
