"""The learnable frequencies of LRPE."""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.layers.mixers.base import FullPrecision
from megalin.ops.choices import LRPEForm
from megalin.parallel.initialisation import Initializer, constant
from megalin.parallel.tensor_parallel import TensorParallel, local


class LRPEFrequencies(FullPrecision):
    """The angular frequencies of LRPE, radians a token: theta [H, K] (cosine) or [H, K/2] (rotation), sharded heads.

    Initial frequencies run over the whole model width, head-major: theta_j = 10000^(-2 j / (H K)), so that head 0
    holds the highest.
    """

    def __init__(self, kind: LRPEForm, num_heads: int, head_dim: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.width = num_heads * head_dim
        self.theta = tp.parameter(num_heads, head_dim if kind == "cosine" else head_dim // 2, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """Sets the initial frequencies."""
        exponent = torch.arange(self.theta.numel(), dtype=torch.float64) * (-2.0 / self.width)
        initializer(self.theta, "theta", constant((10000.0**exponent).view(self.theta.shape)))

    def forward(self) -> tuple[Tensor, ...]:
        """(theta,) of this rank's heads; a copy, because FSDP frees and refills the memory of a sharded parameter."""
        return (local(self.theta).clone(),)


def key_dim(kind: LRPEForm | None, head_dim: int) -> int:
    """Features of a head's queries and keys after LRPE."""
    return 2 * head_dim if kind == "cosine" else head_dim
