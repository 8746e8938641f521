"""LayerNorm of a sum, y = (w n + b) f(g) with s = x + a, n = (s - mean(s)) r and r = (var(s) + eps)^(-1/2).

a and the gate g may be omitted; f is the identity or the sigmoid. Bytes: forward reads x, a and g and writes s and y;
backward reads s, dy, g and the gradient of s and writes dx, which is da too, and dg. The variance is that of the
centred row in registers, so that a large mean costs no digits. Each backward program accumulates partial dw and db over
its rows; the partial sums are added afterwards, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.column_sums import column_sums


@triton.jit
def load_gate(gate_ptr, offset, mask, SIGMOID: tl.constexpr):
    """Loads f(g) [R, W] fp32."""
    gate = tl.load(gate_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if SIGMOID:
        gate = tl.sigmoid(gate)
    return gate


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr,
    addend_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    scale_ptr,
    rows,
    width,
    eps,
    SIGMOID: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    offset = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if addend_ptr is not None:  # the sum is rounded before the norm reads it, as without the fusion
        x += tl.load(addend_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offset, total, mask=mask)
        x = total.to(tl.float32)
    if gate_ptr is not None:
        gate = load_gate(gate_ptr, offset, mask, SIGMOID)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)
    y = centred * scale[:, None] * weight[None, :] + bias[None, :]
    if gate_ptr is not None:
        y *= gate
    tl.store(y_ptr + offset, y, mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(scale_ptr + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "program_rows"])
def backward_kernel(
    dy_ptr,
    dtotal_ptr,
    total_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    scale_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    rows,
    width,
    program_rows,
    SIGMOID: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if gate_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    end = tl.minimum((program + 1) * program_rows, rows)
    for start in tl.range(0, program_rows, BLOCK_ROWS, num_stages=STAGES):
        row = program * program_rows + start + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & inside[None, :]
        offset = row[:, None] * width + column[None, :]
        mean = tl.load(mean_ptr + row, mask=row < end, other=0.0)[:, None]
        scale = tl.load(scale_ptr + row, mask=row < end, other=0.0)[:, None]
        unit = (tl.load(total_ptr + offset, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate = load_gate(gate_ptr, offset, mask, SIGMOID)
            dgate = dy * (unit * weight + bias)
            dy *= gate
            if SIGMOID:
                dgate *= gate * (1.0 - gate)
            tl.store(dgate_ptr + offset, dgate, mask=mask)
        dweight += dy * unit
        dbias += dy
        dy *= weight
        # One reduction for both sums: each one synchronizes the threads of a row.
        means, pulls = tl.split(tl.sum(tl.join(dy, dy * unit), axis=1) / width)
        dx = scale * (dy - means[:, None] - unit * pulls[:, None])
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offset, dx, mask=mask)
    partial = partial_ptr + program * 2 * width + column
    tl.store(partial, tl.sum(dweight, axis=0), mask=inside)
    tl.store(partial + width, tl.sum(dbias, axis=0), mask=inside)


PROCESSORS = 132
"""Multiprocessors; the backward starts three programs per multiprocessor for narrow rows, two with a gate, one for wide
ones."""


class ForwardOutput(NamedTuple):
    """y and s like x, the latter None without an addend; mean and scale r [rows] fp32."""

    y: Tensor
    total: Tensor | None
    mean: Tensor
    scale: Tensor


def _forward_constants(width: int) -> dict[str, int]:
    block_width = triton.next_power_of_2(width)
    return {
        "BLOCK_ROWS": max(1, 2048 // block_width),
        "BLOCK_WIDTH": block_width,
        "num_warps": min(16, max(4, block_width // 512)),
    }


def _backward_constants(width: int, element_size: int) -> dict[str, int]:
    """Kernel constants such that the in-flight rows of s, dy and ds, of STAGES - 1 stages, fit into shared memory."""
    block_width = triton.next_power_of_2(width)
    if width <= 2048:
        return {"STAGES": 3, "BLOCK_ROWS": 2048 // block_width, "BLOCK_WIDTH": block_width, "num_warps": 4}
    stages = 3 if block_width * element_size <= 8192 else 2
    return {"STAGES": stages, "BLOCK_ROWS": 1, "BLOCK_WIDTH": block_width, "num_warps": block_width // 512}


def _programs(width: int, *, gated: bool) -> int:
    """Most programs of the backward."""
    return PROCESSORS * ((2 if gated else 3) if width <= 2048 else 1)


def forward(
    x: Tensor,
    addend: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    gate: Tensor | None = None,
    *,
    sigmoid: bool = False,
) -> ForwardOutput:
    """x, addend, gate [rows, width] contiguous, weight, bias [width] -> `ForwardOutput`."""
    rows, width = x.shape
    y, total = torch.empty_like(x), None if addend is None else torch.empty_like(x)
    mean, scale = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    constants = _forward_constants(width)
    grid = (triton.cdiv(rows, constants["BLOCK_ROWS"]),)
    forward_kernel[grid](
        x, addend, gate, weight, bias, y, total, mean, scale, rows, width, eps, SIGMOID=sigmoid, **constants
    )
    return ForwardOutput(y, total, mean, scale)


class Gradients(NamedTuple):
    """dx like x, dw and db [2, width] like weight, dg like the gate; None without one."""

    x: Tensor
    vectors: Tensor
    gate: Tensor | None


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    sigmoid: bool = False,
) -> Gradients:
    """dy, dtotal, total, gate [rows, width] contiguous, weight [width], mean, scale [rows], bias [width] with a gate ->
    `Gradients`. A dtotal of None is zero."""
    rows, width = total.shape
    constants = _backward_constants(width, total.element_size())
    programs = min(triton.cdiv(rows, constants["BLOCK_ROWS"]), _programs(width, gated=gate is not None))
    dx, dgate = torch.empty_like(total), None if gate is None else torch.empty_like(gate)
    partial = total.new_empty(programs, 2 * width, dtype=torch.float32)
    operands = dy, dtotal, total, gate, weight, bias, mean, scale
    backward_kernel[(programs,)](
        *operands, dx, dgate, partial, rows, width, triton.cdiv(rows, programs), SIGMOID=sigmoid, **constants
    )
    return Gradients(dx, column_sums(partial, weight.dtype).view(2, width), dgate)
