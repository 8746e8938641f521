"""Norms of the residual stream as modules."""

from __future__ import annotations

from torch import Tensor, nn

from megalin.ops.srmsnorm import srmsnorm


class SRMSNorm(nn.Module):
    """x * (mean(x^2) + eps)^(-1/2) over the hidden dimension; no parameters (TransNormerLLM eq. 8)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return srmsnorm(x, eps=self.eps)
