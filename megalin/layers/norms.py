"""Norms of the residual stream as modules, chosen by name in a config."""

from __future__ import annotations

from torch import Tensor, nn

from megalin.layers.choices import NormKind
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.overrides import unchanged
from megalin.ops.norms.layer_norm import NormedSum, add_layer_norm, layer_norm
from megalin.ops.norms.max_norm import max_norm, mean_magnitude_norm
from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.norms.srmsnorm import srmsnorm
from megalin.parallel.initialisation import Initializer, constant
from megalin.parallel.tensor_parallel import TensorParallel, local


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

    def init_weights(self, initializer: Initializer) -> None:
        """Ones."""
        initializer(self.weight, "weight", constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.tp.sequence_parallel_weight(local(self.weight)), eps=self.eps)


class LayerNorm(nn.Module):
    """weight * (x - mean(x)) * (var(x) + eps)^(-1/2) + bias over the hidden dimension, computed in at least fp32."""

    def __init__(self, hidden_size: int, eps: float, *, tp: TensorParallel) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self.weight = tp.parameter(hidden_size, shard_dim=None)
        self.bias = tp.parameter(hidden_size, shard_dim=None)

    def init_weights(self, initializer: Initializer) -> None:
        """Weight one, bias zero."""
        initializer(self.weight, "weight", constant(1.0))
        initializer(self.bias, "bias", constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return layer_norm(x, *self._vectors(), eps=self.eps)

    def add(self, x: Tensor, addend: Tensor | None) -> NormedSum:
        """`add_and_norm` in one pass."""
        return add_layer_norm(x, addend, *self._vectors(), eps=self.eps)

    def of_sum(self, x: Tensor, addend: Tensor | None) -> Tensor:
        """`norm_of_sum` in one pass."""
        return add_layer_norm(x, addend, *self._vectors(), eps=self.eps, sum_gradient=False).normed

    def _vectors(self) -> tuple[Tensor, Tensor]:
        """Weight and bias."""
        weight, bias = (self.tp.sequence_parallel_weight(local(p)) for p in (self.weight, self.bias))
        return weight, bias


class MaxNorm(nn.Module):
    """x / (max |x| + eps) over the hidden dimension; no parameters (DenseAttention)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return max_norm(x, eps=self.eps)


class UncenteredLayerNorm(nn.Module):
    """weight * x / (mean |x| + eps) over the hidden dimension, computed in at least fp32 (DenseAttention)."""

    def __init__(self, hidden_size: int, eps: float, *, tp: TensorParallel) -> None:
        super().__init__()
        self.eps, self.tp = eps, tp
        self.weight = tp.parameter(hidden_size, shard_dim=None)

    def init_weights(self, initializer: Initializer) -> None:
        """Ones."""
        initializer(self.weight, "weight", constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        wide = compute_dtype(x)
        weight = self.tp.sequence_parallel_weight(local(self.weight)).to(wide)
        return (mean_magnitude_norm(x.to(wide), eps=self.eps) * weight).to(x.dtype)


def add_and_norm(norm: nn.Module | None, x: Tensor, addend: Tensor | None) -> NormedSum:
    """norm(x + addend) and x + addend, [..., D]; a norm of None is the identity, an addend of None zero.

    A LayerNorm adds in its own pass. The other norms leave the addition to torch.compile, which fuses it with them at
    the speed of a kernel (docs/benchmarks/2026-11-21-h200-kernels.md).
    """
    if isinstance(norm, LayerNorm) and unchanged(norm, LayerNorm):
        return norm.add(x, addend)
    total = x if addend is None else x + addend
    return NormedSum(total if norm is None else norm(total), total)


def norm_of_sum(norm: nn.Module | None, x: Tensor, addend: Tensor | None) -> Tensor:
    """norm(x + addend) [..., D] where the sum has no other reader: the backward of a LayerNorm then adds no gradient of
    the sum, and compiled blocks pass no zeros for it. Arguments as for `add_and_norm`."""
    if isinstance(norm, LayerNorm) and unchanged(norm, LayerNorm):
        return norm.of_sum(x, addend)
    return add_and_norm(norm, x, addend).normed


def build_norm(kind: NormKind, hidden_size: int, eps: float, tp: TensorParallel) -> nn.Module:
    """The norm of that name over the hidden dimension of the residual stream."""
    match kind:
        case "srmsnorm":
            return SRMSNorm(eps)
        case "rmsnorm":
            return RMSNorm(hidden_size, eps, tp=tp)
        case "layernorm":
            return LayerNorm(hidden_size, eps, tp=tp)
        case "maxnorm":
            return MaxNorm(eps)
        case "uncentered_layernorm":
            return UncenteredLayerNorm(hidden_size, eps, tp=tp)
