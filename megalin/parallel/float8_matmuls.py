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
        record: receives the operands in each backward; for `megalin verify`, not in a compiled block.
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

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K], weight [N, K] in one dtype -> x W^T [..., N]: this rank's outputs, or its partial sums."""
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Float8Linear.apply(rows, weight, self.out_magnitudes, self.in_magnitudes, self)
        return y.view(*x.shape[:-1], -1)

    def input_magnitudes(self, rows: Tensor) -> Tensor:
        """[tokens] magnitudes of the full rows of the input."""
        magnitudes = row_magnitudes(rows)
        return self.tp.max_over_shards(magnitudes) if self.splits_inputs else magnitudes

    def gradient_magnitudes(self, rows: Tensor) -> Tensor:
        """[tokens] magnitudes of the full rows of the output's gradient."""
        magnitudes = row_magnitudes(rows)
        return magnitudes if self.splits_inputs else self.tp.max_over_shards(magnitudes)

    def set_weight_magnitudes(self, outputs: Tensor, inputs: Tensor) -> None:
        """Sets the magnitudes, [N] and [K], of a changed weight."""
        self.out_magnitudes.copy_(outputs)
        self.in_magnitudes.copy_(inputs)


class _Float8Linear(torch.autograd.Function):
    """y = x W^T, dx = dy W, dW = dy^T x: x [M, K], weight [N, K]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, out_magnitudes: Tensor, in_magnitudes: Tensor, matmuls: Float8Matmuls
    ) -> Tensor:
        ctx.matmuls = matmuls
        ctx.save_for_backward(x, weight, in_magnitudes)
        rows, columns = quantize_rows(x, matmuls.input_magnitudes(x)), quantize_rows(weight, out_magnitudes)
        if matmuls.record is not None:
            ctx.operands = rows, columns
        return scaled_matmul(rows, columns, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (dy,), (x, weight, in_magnitudes), matmuls = grads, ctx.saved_tensors, ctx.matmuls
        rows = quantize_rows(dy, matmuls.gradient_magnitudes(dy))
        columns = quantize_rows(weight.t(), in_magnitudes)
        dx = scaled_matmul(rows, columns, dy.dtype)
        if matmuls.weight_gradient:
            dweight = scaled_matmul(quantize_rows(dy.t()), quantize_rows(x.t()), dy.dtype)
        else:
            dweight = dy.t() @ x
        if matmuls.record is not None:
            x_rows, weight_rows = ctx.operands
            matmuls.record(Operands(x_rows, weight_rows, rows, columns))
        return dx, dweight, None, None, None
