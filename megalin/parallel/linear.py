"""Linear layers split over the tensor-parallel axis, Megatron style, with explicit collectives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.ops.srmsnorm import compute_dtype
from megalin.parallel.initialisation import Draw, normal
from megalin.parallel.tensor_parallel import TensorParallel, local


class ColumnParallelLinear(nn.Module):
    """`parts` fused maps y_i = x W_i^T with the outputs of every part split over the axis.

    The weight is one parameter [parts, out, in], split along `out`: the split lies inside each part by construction,
    and its flat view [parts * out, in] is the published layout. The input must have entered the sharded region
    (`TensorParallel.enter`), once for all layers that read it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: int = 1,
        tp: TensorParallel,
        std: float,
        name: str,
    ) -> None:
        """Raises ConfigError where `out_features`, called `name` in the message, does not divide."""
        super().__init__()
        self.parts, self.in_features, self.out_features, self.std = parts, in_features, out_features, std
        tp.divide(out_features, name)
        self.weight = tp.fused_parameter(parts, out_features, in_features)

    def fill(self, draw: Draw) -> None:
        """Draws the weight from N(0, std^2)."""
        draw(self.weight, "weight", normal(self.std))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, T, in] -> `parts` tensors [B, T, out/tp]."""
        weight = local(self.weight)
        y = functional.linear(x, weight.flatten(0, 1))  # [B, T, parts * out/tp]
        return y.unflatten(-1, (self.parts, -1)).unbind(-2)

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return 2 * self.parts * self.in_features * self.out_features


class RowParallelLinear(nn.Module):
    """y = x W^T with the inputs split over the axis; the ranks' partial sums leave through one collective."""

    def __init__(self, in_features: int, out_features: int, *, tp: TensorParallel, std: float, name: str) -> None:
        """Raises ConfigError where `in_features`, called `name` in the message, does not divide."""
        super().__init__()
        self.in_features, self.out_features, self.std, self.tp = in_features, out_features, std, tp
        tp.divide(in_features, name)
        self.weight = tp.parameter(out_features, in_features, shard_dim=1)

    def fill(self, draw: Draw) -> None:
        """Draws the weight from N(0, std^2)."""
        draw(self.weight, "weight", normal(self.std))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in/tp] -> [B, T, out], the residual stream's layout."""
        return self.tp.leave(functional.linear(x, local(self.weight)))

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return 2 * self.in_features * self.out_features


class NormedRowParallelLinear(RowParallelLinear):
    """y = (SRMSNorm(x) * gate) W^T, the norm over the whole width of an x that is split over the axis.

    The norm is one number a token, r = (sum over ranks of sum_j x_j^2 / in + eps)^(-1/2), so it commutes with the
    matrix: y = r * sum over ranks of (x * gate) W^T. The squares travel in an fp32 all-reduce of their own, one
    number a token, launched before the product: as a column of the bf16 payload they would cost 4e-3 of precision.
    """

    def __init__(
        self, in_features: int, out_features: int, *, eps: float, tp: TensorParallel, std: float, name: str
    ) -> None:
        super().__init__(in_features, out_features, tp=tp, std=std, name=name)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """x, gate [B, T, in/tp] -> [B, T, out], the residual stream's layout."""
        squares = x.to(compute_dtype(x)).square().sum(-1)  # [B, T]
        total = self.tp.reduce_tokens(squares)  # waited on at its first use, after the product
        y = super().forward(x * gate)
        return (torch.rsqrt(total / self.in_features + self.eps)[..., None] * y).to(y.dtype)


class LowRankLinear(nn.Module):
    """y = x W_down^T W_up^T with rank `rank`: W_down is replicated and computed on every rank, W_up is split.

    W_down meets only the part of the gradient that flows through this rank's columns, so its gradient is a partial
    sum (`TensorParallel.partial_gradient`).
    """

    def __init__(
        self, in_features: int, rank: int, out_features: int, *, tp: TensorParallel, std: float, name: str
    ) -> None:
        """Raises ConfigError where `out_features`, called `name` in the message, does not divide."""
        super().__init__()
        self.in_features, self.rank, self.out_features, self.std, self.tp = (
            in_features,
            rank,
            out_features,
            std,
            tp,
        )
        tp.divide(out_features, name)
        self.down = tp.parameter(rank, in_features, shard_dim=None)
        self.up = tp.parameter(out_features, rank, shard_dim=0)

    def fill(self, draw: Draw) -> None:
        """Draws both matrices from N(0, std^2)."""
        draw(self.down, "down", normal(self.std))
        draw(self.up, "up", normal(self.std))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in] (entered) -> [B, T, out/tp]."""
        hidden = functional.linear(x, self.tp.partial_gradient(local(self.down)))
        return functional.linear(hidden, local(self.up))

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return 2 * self.rank * (self.in_features + self.out_features)
