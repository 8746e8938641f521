"""Linear layers sharded over the tensor-parallel axis, Megatron style, with explicit collectives."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.ops.choices import Activation
from megalin.ops.decoding.few_rows import add_linear, few_row_linear
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.overrides import unchanged
from megalin.ops.dispatch.projection_part import ProjectionPart, tensor_of
from megalin.ops.gates.gated_product import gated_product
from megalin.ops.norms.gated_layer_norm import apply_gate, gated_layer_norm, layer_norm_of_moments
from megalin.ops.norms.gated_squares import GatedSquares, gated_squares
from megalin.ops.norms.layer_norm import GateActivation
from megalin.ops.norms.skip_gated_squares import skip_gated_squares
from megalin.ops.scaled_linear import ScaledRows
from megalin.parallel.float8_matmuls import Float8Matmuls
from megalin.parallel.initialisation import Initializer, constant, normal
from megalin.parallel.tensor_parallel import TensorParallel, local


class ColumnParallelLinear(nn.Module):
    """`parts` fused matrices y_i = x W_i^T (+ b_i), each sharded along its outputs over the axis.

    The weight is one parameter [parts, out, in], sharded along `out`, so every rank holds a slice of every part; its
    flat view [parts * out, in] is the published layout. An input that several layers read is gathered once by
    `TensorParallel.enter`; the only reader of the residual stream may gather it itself (`gather_input`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: int = 1,
        bias: bool = False,
        tp: TensorParallel,
        std: float,
        name: str,
    ) -> None:
        """Raises ConfigError where `out_features`, called `name` in the message, does not divide."""
        super().__init__()
        self.parts, self.in_features, self.out_features, self.std = parts, in_features, out_features, std
        self.tp = tp
        tp.divide(out_features, name)
        self.weight = tp.fused_parameter(parts, out_features, in_features)
        self.bias = tp.parameter(parts, out_features, shard_dim=1) if bias else None
        self.float8: Float8Matmuls | None = None

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the weight from N(0, std^2); the bias is zero."""
        initializer(self.weight, "weight", normal(self.std))
        if self.bias is not None:
            initializer(self.bias, "bias", constant(0.0))

    @overload
    def forward(
        self, x: Tensor, *, gather_input: bool = ..., split_parts: Literal[True] = ...
    ) -> tuple[Tensor, ...]: ...

    @overload
    def forward(self, x: Tensor, *, gather_input: bool = ..., split_parts: Literal[False]) -> Tensor: ...

    def forward(
        self, x: Tensor, *, gather_input: bool = False, split_parts: bool = True
    ) -> Tensor | tuple[Tensor, ...]:
        """[B, T, in] -> `parts` tensors [B, T, out/tp], or one [B, T, parts * out/tp].

        Args:
            gather_input: x is the residual stream [B, T or T/tp, in], which no other layer reads: it enters the
                sharded region here (`TensorParallel.all_gather_linear`). Otherwise x has entered it already.
            split_parts: return each part as a tensor of its own, or all of them concatenated for a fused op.
        """
        weight = local(self.weight).flatten(0, 1)
        bias = None if self.bias is None else local(self.bias).flatten()
        if self.float8 is not None:
            y = self.float8(self.tp.enter(x) if gather_input else x, weight)
            y = y if bias is None else y + bias
        else:
            linear = self.tp.all_gather_linear if gather_input else few_row_linear
            y = linear(x, weight, bias)
        return y.unflatten(-1, (self.parts, -1)).unbind(-2) if split_parts else y

    def gated(self, x: Tensor, activation: Activation) -> tuple[Tensor, ScaledRows | None]:
        """act(g) v [B, T, out/tp] of the two parts g and v, and its FP8 rows where a kernel computes them with it.

        Args:
            x: the residual stream [B, T or T/tp, in], which no other layer reads.
        """
        if self.float8 is not None and self.bias is None and unchanged(self, ColumnParallelLinear):
            return self.float8.gated(self.tp.enter(x), local(self.weight).flatten(0, 1), activation)
        return gated_product(self(x, gather_input=True, split_parts=False), activation=activation), None

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return 2 * self.parts * self.in_features * self.out_features


class RowParallelLinear(nn.Module):
    """y = x W^T (+ b), sharded along its inputs over the axis; one collective reduces the ranks' partial sums.

    The bias is replicated and added once, after the collective.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        tp: TensorParallel,
        std: float,
        name: str,
    ) -> None:
        """Raises ConfigError where `in_features`, called `name` in the message, does not divide."""
        super().__init__()
        self.in_features, self.out_features, self.std, self.tp = in_features, out_features, std, tp
        tp.divide(in_features, name)
        self.weight = tp.parameter(out_features, in_features, shard_dim=1)
        self.bias = tp.parameter(out_features, shard_dim=None) if bias else None
        self.float8: Float8Matmuls | None = None

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the weight from N(0, std^2); the bias is zero."""
        initializer(self.weight, "weight", normal(self.std))
        if self.bias is not None:
            initializer(self.bias, "bias", constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in/tp] -> [B, T, out], the residual stream's layout."""
        return self._add_bias(self._matmul(x))

    def forward_quantized(self, x: Tensor, rows: ScaledRows | None) -> Tensor:
        """`forward` of an x that `ColumnParallelLinear.gated` quantised already, or has not."""
        if rows is None or not unchanged(self, RowParallelLinear):
            y: Tensor = self(x)
            return y
        return self._add_bias(self._matmul(x, rows))

    @property
    def joins_addition(self) -> bool:
        """True where `add_to` may join the addition with the matmul: neither a collective nor a bias comes between, and
        the matmul is not in FP8."""
        return self.tp.size == 1 and self.bias is None and self.float8 is None

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T in decoding, where `joins_addition`: residual [..., out], x [..., in]. No gradients."""
        return add_linear(residual, x, local(self.weight))

    def _matmul(self, x: Tensor, rows: ScaledRows | None = None) -> Tensor:
        if self.float8 is not None:
            return self.tp.leave(self.float8(x, local(self.weight), rows))
        return self.tp.linear_reduce_scatter(x, local(self.weight))

    def _add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.tp.sequence_parallel_weight(local(self.bias))

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return 2 * self.in_features * self.out_features


class Skip(NamedTuple):
    """A feed-through `factor x` that a norm's input gets before its gate."""

    x: Tensor
    """[B, T, in/tp]."""
    factor: Tensor
    """[in/tp]."""


class NormedRowParallelLinear(RowParallelLinear):
    """y = (norm(x) * gate) W^T (+ b), the norm over the full width of an x that is sharded over the axis.

    srmsnorm, rmsnorm: one number a token, r = (sum over ranks of sum_j x_j^2 / in + eps)^(-1/2), which commutes with
    the matrix: y = r * sum over ranks of (x * weight * gate) W^T. The squares are summed by an fp32 all-reduce of their
    own, launched before the matmul: as a column of the bf16 payload they would cost 4e-3 of precision.

    layernorm: a gate between the norm and the matrix keeps the mean from commuting, so sum and sum of squares, two fp32
    numbers a token, are all-reduced before the matmul, and so is their gradient in the backward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        bias: bool = False,
        tp: TensorParallel,
        std: float,
        name: str,
        norm: Literal["srmsnorm", "rmsnorm", "layernorm"] = "srmsnorm",
    ) -> None:
        """Raises ConfigError where `in_features`, called `name` in the message, does not divide."""
        super().__init__(in_features, out_features, bias=bias, tp=tp, std=std, name=name)
        self.norm, self.eps = norm, eps
        if norm != "srmsnorm":
            self.norm_weight = tp.parameter(in_features, shard_dim=0)
        if norm == "layernorm":
            self.norm_bias = tp.parameter(in_features, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the weight from N(0, std^2); the norm's weight is one, biases are zero."""
        super().init_weights(initializer)
        if self.norm != "srmsnorm":
            initializer(self.norm_weight, "norm_weight", constant(1.0))
        if self.norm == "layernorm":
            initializer(self.norm_bias, "norm_bias", constant(0.0))

    def forward(
        self,
        x: Tensor,
        gate: Tensor | ProjectionPart | None = None,
        *,
        gate_activation: GateActivation = "none",
        skip: Skip | None = None,
    ) -> Tensor:
        """x and, where there is one, gate [B, T, in/tp] -> [B, T, out], the residual stream's layout.

        Args:
            gate_activation: applied to the gate here, in the pass of a layernorm; the other norms take an active gate.
            skip: the input of the norm is (x + skip) silu(gate), for an rmsnorm.
        """
        if skip is not None:
            assert self.norm == "rmsnorm", self.norm
            assert gate is not None
            return self._normed_matmul(skip_gated_squares(x, skip.x, skip.factor, gate, local(self.norm_weight)))
        assert not isinstance(gate, ProjectionPart)
        if self.norm == "layernorm":
            return self._add_bias(self._matmul(self._layer_norm(x, gate, gate_activation)))
        assert gate_activation == "none", gate_activation
        weight = local(self.norm_weight) if self.norm == "rmsnorm" else None
        return self._normed_matmul(gated_squares(x, gate, weight))

    @property
    def joins_addition(self) -> bool:
        return super().joins_addition and self.norm == "srmsnorm"

    def add_normed_to(self, residual: Tensor, product: Tensor, squares: Tensor) -> Tensor:
        """residual + (norm(x) * gate) W^T in decoding, where `joins_addition`, from the product of x and the gate
        [..., in] and partial sums of the squares of x [..., P]. No gradients."""
        weight = local(self.weight)
        return add_linear(residual, product, weight, squares, width=self.in_features, eps=self.eps)

    def _normed_matmul(self, parts: GatedSquares) -> Tensor:
        total = self.tp.reduce_tokens(parts.squares)  # waited on at its first use, after the matmul
        y = self._matmul(parts.product)
        return self._add_bias((torch.rsqrt(total / self.in_features + self.eps)[..., None] * y).to(y.dtype))

    def _layer_norm(self, x: Tensor, gate: Tensor | None, activation: GateActivation) -> Tensor:
        weight, bias = local(self.norm_weight), local(self.norm_bias)
        if self.tp.size == 1:
            return gated_layer_norm(x, gate, weight, bias, eps=self.eps, gate_activation=activation)
        wide = x.to(compute_dtype(x))
        sums = self.tp.all_reduce_both(torch.stack([wide.sum(-1), wide.square().sum(-1)], dim=-1))  # [B, T, 2]
        y = layer_norm_of_moments(wide, sums / self.in_features, weight, bias, eps=self.eps).to(x.dtype)
        return apply_gate(y, gate, activation)


class GroupNormedRowParallelLinear(RowParallelLinear):
    """y = (norm(x) * weight) W^T, an RMSNorm over each of `groups` equal parts of the width, each whole on one rank.

    The norms need no collective. They do not commute with the matrix, so they are computed before it, in fp32 (fp64).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        groups: int,
        eps: float,
        tp: TensorParallel,
        std: float,
        name: str,
    ) -> None:
        """Raises ConfigError where `in_features`, called `name` in the message, does not divide."""
        super().__init__(in_features, out_features, tp=tp, std=std, name=name)
        assert in_features % groups == 0, (in_features, groups)
        assert groups % tp.size == 0, (groups, tp.size)
        self.group_size, self.eps = in_features // groups, eps
        self.norm_weight = tp.parameter(in_features, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the weight from N(0, std^2); the norm's weight is one."""
        super().init_weights(initializer)
        initializer(self.norm_weight, "norm_weight", constant(1.0))

    def forward(self, x: Tensor, gate: Tensor | ProjectionPart, *, skip: Skip) -> Tensor:  # type: ignore[override]
        """(x + skip) silu(gate), normalized and multiplied: x, gate [B, T, in/tp]."""
        wide = compute_dtype(x)
        product = (x.to(wide) + skip.factor * skip.x.to(wide)) * functional.silu(tensor_of(gate).to(wide))
        parts = product.unflatten(-1, (-1, self.group_size))  # [B, T, groups/tp, in/groups]
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return super().forward((normed.flatten(-2) * local(self.norm_weight).to(wide)).to(x.dtype))


class LowRankLinear(nn.Module):
    """y = x W_down^T W_up^T with rank `rank`: W_down is replicated and computed on every rank, W_up is sharded.

    The gradient of W_down flows through this rank's columns alone, so it is a partial sum
    (`TensorParallel.all_reduce_gradient`).
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

    def init_weights(self, initializer: Initializer) -> None:
        """Draws both matrices from N(0, std^2)."""
        initializer(self.down, "down", normal(self.std))
        initializer(self.up, "up", normal(self.std))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, in] (after `TensorParallel.enter`) -> [B, T, out/tp]."""
        hidden = few_row_linear(x, self.tp.all_reduce_gradient(local(self.down)))
        return few_row_linear(hidden, local(self.up))

    def flops(self) -> int:
        """Forward floating-point operations a token, whole axis."""
        return 2 * self.rank * (self.in_features + self.out_features)


class ReplicatedLinear(nn.Module):
    """y = x W^T (+ b) on tokens that every rank holds (`TensorParallel.pick_tokens`); each rank computes all of it."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, tp: TensorParallel, std: float
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.std = in_features, out_features, std
        self.weight = tp.parameter(out_features, in_features, shard_dim=None)
        self.bias = tp.parameter(out_features, shard_dim=None) if bias else None

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the weight from N(0, std^2); the bias is zero."""
        initializer(self.weight, "weight", normal(self.std))
        if self.bias is not None:
            initializer(self.bias, "bias", constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return functional.linear(x, local(self.weight), None if self.bias is None else local(self.bias))

    def flops(self) -> int:
        """Forward floating-point operations a token, of one rank."""
        return 2 * self.in_features * self.out_features
