"""Norms of the residual stream as modules, by the name that a config gives them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from megalin.ops.srmsnorm import compute_dtype, srmsnorm
from megalin.parallel.initialisation import Draw, constant
from megalin.parallel.tensor_parallel import TensorParallel, local

NormKind = Literal["srmsnorm", "rmsnorm", "layernorm"]
"""srmsnorm: no parameters. rmsnorm: a weight. layernorm: a weight and a bias, centred."""


class SRMSNorm(nn.Module):
    """x * (mean(x^2) + eps)^(-1/2) over the hidden dimension; no parameters (TransNormerLLM eq. 8)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return srmsnorm(x, eps=self.eps)


class RMSNorm(nn.Module):
    """weight * x * (mean(x^2) + eps)^(-1/2) over the hidden dimension, computed in at least fp32."""

    def __init__(self, hidden_size: int, eps: float, *, tp: TensorParallel) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self.weight = tp.parameter(hidden_size, shard_dim=None)

    def fill(self, draw: Draw) -> None:
        """Ones."""
        draw(self.weight, "weight", constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        wide = compute_dtype(x)
        weight = self.tp.stream_weight(local(self.weight)).to(wide)
        return (srmsnorm(x.to(wide), eps=self.eps) * weight).to(x.dtype)


class LayerNorm(nn.Module):
    """weight * (x - mean(x)) * (var(x) + eps)^(-1/2) + bias over the hidden dimension, computed in at least fp32."""

    def __init__(self, hidden_size: int, eps: float, *, tp: TensorParallel) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self.weight = tp.parameter(hidden_size, shard_dim=None)
        self.bias = tp.parameter(hidden_size, shard_dim=None)

    def fill(self, draw: Draw) -> None:
        """Weight one, bias zero."""
        draw(self.weight, "weight", constant(1.0))
        draw(self.bias, "bias", constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        wide = compute_dtype(x)
        weight, bias = (self.tp.stream_weight(local(p)).to(wide) for p in (self.weight, self.bias))
        return functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, self.eps).to(x.dtype)


def build_norm(kind: NormKind, hidden_size: int, eps: float, tp: TensorParallel) -> nn.Module:
    """The norm of that name over the whole residual stream."""
    if kind == "srmsnorm":
        return SRMSNorm(eps)
    return (RMSNorm if kind == "rmsnorm" else LayerNorm)(hidden_size, eps, tp=tp)
