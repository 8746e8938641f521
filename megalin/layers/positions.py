"""LRPE as a module: learnable frequencies per head, in the cosine or the rotation form."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from megalin.ops.positions import lrpe_cosine, lrpe_rotation
from megalin.parallel.initialisation import Draw, constant
from megalin.parallel.tensor_parallel import TensorParallel, local

LRPEKind = Literal["cosine", "rotation"]


class LRPE(nn.Module):
    """Applies LRPE to queries and keys. theta [H, K] (cosine) or [H, K/2] (rotation), heads split over the axis.

    Initial frequencies run over the whole model width, head-major: theta_j = 10000^(-2 j / (H K)), so that head 0
    holds the highest. Angles feed sines at positions far above 256: the parameter computes in fp32.
    """

    full_precision = True

    def __init__(self, kind: LRPEKind, num_heads: int, head_dim: int, *, tp: TensorParallel) -> None:
        super().__init__()
        self.kind: LRPEKind = kind
        self.width = num_heads * head_dim
        self.theta = tp.parameter(num_heads, head_dim if kind == "cosine" else head_dim // 2, shard_dim=0)

    def fill(self, draw: Draw) -> None:
        """Sets the initial frequencies."""
        exponent = torch.arange(self.theta.numel(), dtype=torch.float64) * (-2.0 / self.width)
        draw(self.theta, "theta", constant((10000.0**exponent).view(self.theta.shape)))

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q, k [B, T, H/tp, K] -> the same, with 2 K features a head in the cosine form."""
        apply = lrpe_cosine if self.kind == "cosine" else lrpe_rotation
        theta = local(self.theta)
        return apply(q, theta, positions), apply(k, theta, positions)


def key_dim(kind: LRPEKind | None, head_dim: int) -> int:
    """Features of a head's queries and keys after LRPE."""
    return 2 * head_dim if kind == "cosine" else head_dim
