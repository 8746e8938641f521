"""FP8 matmuls of one sharded linear layer: y = x W^T and dx = dy W of e4m3 rows, the same codes on every mesh.

Operands are quantised row by row along the dimension that a matmul contracts (`ops/scaled_linear.py`). Where ranks hold
shards of a row, its scale is that of the full row: magnitudes are all-reduced (max) over the tensor-parallel axis,

| matmul      | column-parallel, W [N/tp, K]   | row-parallel, W [N, K/tp]    |
| ----------- | ------------------------------ | ---------------------------- |
| y = x W^T   | local                          | of x [tokens] and of W [N]   |
| dx = dy W   | of dy [tokens] and of W^T [K]  | local                        |

those of weights once an update (`float8_layers.py`). dW = dy^T x is computed in the compute dtype; as an option in FP8,
with scales of this rank's tokens. docs/adr/0018-float8.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalin.ops.choices import Activation
from megalin.ops.gates.gated_product import gated_product
from megalin.ops.quantized_gated_product import (
    fuses_gated_product,
    quantized_gated_product,
    quantized_gated_product_backward,
)
from megalin.ops.scaled_linear import ScaledRows, quantize_rows, row_magnitudes, scaled_matmul
from megalin.parallel.tensor_parallel import TensorParallel


class Operands(NamedTuple):
    """The quantised operands of one forward and backward of a layer."""

    x: ScaledRows  # [tokens, K]
    weight: ScaledRows  # [N, K]
    dy: ScaledRows  # [tokens, N]
    transposed_weight: ScaledRows  # [K, N]


class Float8Matmuls(nn.Module):
    """The FP8 matmuls of one linear layer, with the magnitudes of the rows of its weight and of its transpose.

    Attributes:
        out_magnitudes: [N] max |w| over the full rows of the weight, N this rank's outputs, parts included.
        in_magnitudes: [K] max |w| over the full rows of its transpose, K this rank's inputs.
        record: receives the operands in each backward, and keeps `gated` from fusing; for `megalin verify`, not in a
            compiled block.
    """

    out_magnitudes: Tensor
    in_magnitudes: Tensor

    def __init__(
        self,
        num_outputs: int,
        num_inputs: int,
        *,
        tp: TensorParallel,
        splits_inputs: bool,
        weight_gradient: bool,
        device: torch.device,
    ) -> None:
        """
        Args:
            num_outputs, num_inputs: N and K of this rank.
            splits_inputs: True for a row-parallel layer, False for a column-parallel one.
            weight_gradient: whether the gradient of the weight is computed in FP8 too.
        """
        super().__init__()
        self.tp, self.splits_inputs, self.weight_gradient = tp, splits_inputs, weight_gradient
        self.record: Callable[[Operands], None] | None = None
        for name, size in (("out_magnitudes", num_outputs), ("in_magnitudes", num_inputs)):
            self.register_buffer(name, torch.empty(size, dtype=torch.float32, device=device), persistent=False)

    def forward(self, x: Tensor, weight: Tensor, rows: ScaledRows | None = None) -> Tensor:
        """x [..., K], weight [N, K] in one dtype -> x W^T [..., N]: this rank's outputs, or its partial sums.

        Args:
            rows: x quantised already, by `gated`.
        """
        matrix, (codes, scales) = x.reshape(-1, x.shape[-1]), rows or (None, None)
        y: Tensor = _Float8Linear.apply(matrix, weight, codes, scales, self.in_magnitudes, self)
        return y.view(*x.shape[:-1], -1)

    def gated(self, x: Tensor, weight: Tensor, activation: Activation) -> tuple[Tensor, ScaledRows | None]:
        """act(g) v [..., N/2] of [g | v] = x W^T, and its rows for the next layer where a kernel quantises them.

        The kernel also quantises the gradient of [g | v] as it is computed, which saves one read of each. It needs full
        rows of both, so other meshes than tp = 1 cast separately, with the same codes.
        """
        if self.tp.size == 1 and self.record is None and fuses_gated_product(x, len(weight) // 2):
            matrix = x.reshape(-1, x.shape[-1])
            product, codes, scales = _GatedFloat8Linear.apply(matrix, weight, self.in_magnitudes, self, activation)
            return product.view(*x.shape[:-1], -1), ScaledRows(codes, scales)
        return gated_product(self(x, weight), activation=activation), None

    def input_magnitudes(self, rows: Tensor) -> Tensor:
        """[tokens] magnitudes of the full rows of the input."""
        magnitudes = row_magnitudes(rows)
        return self.tp.max_over_shards(magnitudes) if self.splits_inputs else magnitudes

    def gradient_magnitudes(self, rows: Tensor) -> Tensor:
        """[tokens] magnitudes of the full rows of the output's gradient."""
        magnitudes = row_magnitudes(rows)
        return magnitudes if self.splits_inputs else self.tp.max_over_shards(magnitudes)

    def multiply(self, rows: ScaledRows, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ScaledRows]:
        """x W^T of quantised rows of x, and the rows of W."""
        columns = quantize_rows(weight, self.out_magnitudes, stored=True)
        return scaled_matmul(rows, columns, dtype), columns

    def gradients(
        self, dy: Tensor, rows: ScaledRows, x: Tensor, weight: Tensor, in_magnitudes: Tensor
    ) -> tuple[Tensor, Tensor, ScaledRows]:
        """dx = dy W of dy and its quantised rows, dW = dy^T x, and the rows of W^T."""
        columns = quantize_rows(weight.t(), in_magnitudes, stored=True)
        dx = scaled_matmul(rows, columns, dy.dtype)
        if self.weight_gradient:
            return dx, scaled_matmul(quantize_rows(dy.t()), quantize_rows(x.t()), dy.dtype), columns
        return dx, dy.t() @ x, columns


class _Float8Linear(torch.autograd.Function):
    """y = x W^T, dx = dy W, dW = dy^T x: x [M, K], with codes and scales if it is quantised already, weight [N, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        codes: Tensor | None,
        scales: Tensor | None,
        in_magnitudes: Tensor,
        matmuls: Float8Matmuls,
    ) -> Tensor:
        ctx.matmuls = matmuls
        ctx.save_for_backward(x, weight, in_magnitudes)
        if codes is None or scales is None:
            rows = quantize_rows(x, matmuls.input_magnitudes(x))
        else:
            rows = ScaledRows(codes, scales)
        y, columns = matmuls.multiply(rows, weight, x.dtype)
        if matmuls.record is not None:
            ctx.operands = rows, columns
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        (dy,), (x, weight, in_magnitudes), matmuls = grads, ctx.saved_tensors, ctx.matmuls
        rows = quantize_rows(dy, matmuls.gradient_magnitudes(dy))
        dx, dweight, columns = matmuls.gradients(dy, rows, x, weight, in_magnitudes)
        if matmuls.record is not None:
            x_rows, weight_rows = ctx.operands
            matmuls.record(Operands(x_rows, weight_rows, rows, columns))
        return dx, dweight, None, None, None, None


class _GatedFloat8Linear(torch.autograd.Function):
    """p = act(g) v of [g | v] = x W^T, with the codes of p and of the gradient of [g | v]: x [M, K], weight [2 F, K] ->
    p [M, F], its codes and scales."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, in_magnitudes: Tensor, matmuls: Float8Matmuls, activation: Activation
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, _ = matmuls.multiply(quantize_rows(x, row_magnitudes(x)), weight, x.dtype)
        product, rows = quantized_gated_product(y, activation=activation)
        ctx.matmuls, ctx.activation = matmuls, activation
        ctx.save_for_backward(x, weight, in_magnitudes, y)
        ctx.mark_non_differentiable(*rows)
        return product, *rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dproduct, (x, weight, in_magnitudes, y), matmuls = grads[0], ctx.saved_tensors, ctx.matmuls
        dy, rows = quantized_gated_product_backward(dproduct, y, activation=ctx.activation)
        dx, dweight, _ = matmuls.gradients(dy, rows, x, weight, in_magnitudes)
        return dx, dweight, None, None, None
