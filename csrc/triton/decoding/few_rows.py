"""Linear maps of few rows, each a matrix-vector product bound by the weight's bytes, and what surrounds larger ones.

y = x W^T for rows x [rows, K], W [N, K]; with `GLU` act(r g) r v for W = [W_g | W_v] and the row's SRMSNorm scale r;
with a residual, z + s y, s the scale of summed squares. A program reads a few whole rows of the weight, all at once if
they have 2048 columns or fewer. Programs of one block of weights and different rows run together, so that the weight
comes from memory once.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.decoding.row_scale import row_scale, summed_scale
from megalin._triton.dispatch.dependent_launch import dependent_launch, wait_for_inputs

BLOCK_N, BLOCK_K = 4, 2048
"""Rows and columns of the weight that a program reads at once."""
COLUMNS = 1024


@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, residual_ptr, squares_ptr, y_ptr, rows, outputs, count, width, eps,
    K: tl.constexpr, GLU: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) % rows).to(tl.int64)
    output = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    known = output < outputs
    place = output.to(tl.int64)[:, None] * K
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    value = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    second_ptr = weight_ptr + outputs.to(tl.int64) * K
    for start in tl.static_range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        mask = known[:, None] & (column < K)[None, :]
        weight = tl.load(weight_ptr + place + column[None, :], mask=mask, other=0.0)
        if GLU:
            second = tl.load(second_ptr + place + column[None, :], mask=mask, other=0.0)
        if start == 0:
            wait_for_inputs(PDL)  # while the first weights arrive
        x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        if GLU:
            value += second.to(tl.float32) * x[None, :]
        if NORM:
            squares += x * x
    y = tl.sum(total, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
    if GLU:
        v = tl.sum(value, axis=1)
        if NORM:
            v *= scale
        if SILU:
            y *= tl.sigmoid(y)
        y *= v
    if SCALED:
        y *= summed_scale(squares_ptr + row * count, count, width, eps, BLOCK_SQUARES)
    if RESIDUAL:
        y += tl.load(residual_ptr + row * outputs + output, mask=known, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * outputs + output, y, mask=known)


@triton.jit
def product_kernel(
    gate_value_ptr, x_ptr, product_ptr, size, width, eps,
    SILU: tl.constexpr, PDL: tl.constexpr, BLOCK_X: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = gate_value_ptr + row * (2 * size) + column
    wait_for_inputs(PDL)
    gate = tl.load(source, mask=column < size, other=0.0).to(tl.float32)
    value = tl.load(source + size, mask=column < size, other=0.0).to(tl.float32)
    scale = row_scale(x_ptr + row * width, width, eps, BLOCK_X)
    gate *= scale
    if SILU:
        gate *= tl.sigmoid(gate)
    tl.store(product_ptr + row * size + column, gate * value * scale, mask=column < size)


@triton.jit
def add_kernel(
    y_ptr, residual_ptr, squares_ptr, sum_ptr, outputs, count, width, eps,
    SCALED: tl.constexpr, PDL: tl.constexpr, BLOCK_SQUARES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row * outputs + column
    wait_for_inputs(PDL)
    y = tl.load(y_ptr + at, mask=column < outputs, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=column < outputs, other=0.0).to(tl.float32)
    if SCALED:
        y *= summed_scale(squares_ptr + row * count, count, width, eps, BLOCK_SQUARES)
    tl.store(sum_ptr + at, residual + y, mask=column < outputs)


def linear(
    x: Tensor, weight: Tensor, *, residual: Tensor | None = None, squares: Tensor | None = None, width: int = 1,
    eps: float = 0.0, glu: str | None = None
) -> Tensor:  # fmt: skip
    """x [rows, K], weight [N or 2 N, K], residual [rows, N], squares [rows, count], all contiguous -> [rows, N].

    With `glu`, "none" or "silu", the norm of x has `eps`; with `squares`, their norm.
    """
    rows, inner = x.shape
    outputs, count = weight.shape[0] // (1 if glu is None else 2), 1 if squares is None else squares.shape[1]
    block = BLOCK_N if glu is None else BLOCK_N // 2
    y = x.new_empty(rows, outputs)
    linear_kernel[(rows * triton.cdiv(outputs, block),)](
        x, weight, residual, squares, y, rows, outputs, count, width, eps,
        K=inner, GLU=glu is not None, SILU=glu == "silu", NORM=glu is not None, RESIDUAL=residual is not None,
        SCALED=squares is not None, BLOCK_SQUARES=triton.next_power_of_2(count), BLOCK_N=block,
        BLOCK_K=min(triton.next_power_of_2(inner), BLOCK_K), **dependent_launch(), num_warps=4,
    )  # fmt: skip
    return y


def scaled_product(gate_value: Tensor, x: Tensor, eps: float, *, silu: bool) -> Tensor:
    """act(r g) r v: gate_value [rows, 2 F] (g before v), x [rows, D], contiguous -> [rows, F]."""
    (rows, both), width = gate_value.shape, x.shape[1]
    product = gate_value.new_empty(rows, both // 2)
    product_kernel[(rows, triton.cdiv(both // 2, COLUMNS))](
        gate_value, x, product, both // 2, width, eps,
        SILU=silu, BLOCK_X=triton.next_power_of_2(width), COLUMNS=COLUMNS, **dependent_launch(), num_warps=4,
    )  # fmt: skip
    return product


def scaled_sum(y: Tensor, residual: Tensor, squares: Tensor | None, *, width: int, eps: float) -> Tensor:
    """residual + s y, s the scale of the squares [rows, count], or 1 without: y, residual [rows, N], contiguous."""
    (rows, outputs), count = y.shape, 1 if squares is None else squares.shape[1]
    total = torch.empty_like(residual)
    add_kernel[(rows, triton.cdiv(outputs, COLUMNS))](
        y, residual, squares, total, outputs, count, width, eps,
        SCALED=squares is not None, BLOCK_SQUARES=triton.next_power_of_2(count), COLUMNS=COLUMNS,
        **dependent_launch(), num_warps=4,
    )  # fmt: skip
    return total
