"""Computes p = x w g and the row sums of x^2; with the gate first p = u w and the row sums of u^2, u = x silu(g).

Bytes: forward reads x and g and writes p; backward reads x, g, dp and writes dx, dg. Each backward program iterates
over a segment of rows for a tile of columns and accumulates a partial dw; the partial sums are added afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.column_sums import column_sums

PROGRAMS = 132 * 4
"""Programs of the backward: four per multiprocessor, for any number of rows."""


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    product_ptr,
    squares_ptr,
    rows,
    width,
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], dtype=tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        column = start + tl.arange(0, BLOCK_WIDTH)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(gate_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            if GATE_FIRST:
                x = x * gate * tl.sigmoid(gate)
        squares += x * x
        if WEIGHTED:
            x *= tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if GATED and not GATE_FIRST:
            x *= gate
        tl.store(product_ptr + offset, x, mask=mask)
    tl.store(squares_ptr + row, tl.sum(squares, axis=1), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "segment_rows"])
def backward_kernel(
    dproduct_ptr,
    dsquares_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    rows,
    width,
    segment_rows,
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * segment_rows
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    end = tl.minimum(first + segment_rows, rows)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([BLOCK_WIDTH], dtype=tl.float32)
    for start in tl.range(0, segment_rows, BLOCK_ROWS, num_stages=STAGES):
        row = first + start + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dproduct = tl.load(dproduct_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dsquares = tl.load(dsquares_ptr + row, mask=row < end, other=0.0)[:, None]
        if GATED:
            gate = tl.load(gate_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            if GATE_FIRST:
                sigmoid = tl.sigmoid(gate)
                silu = gate * sigmoid
                du = dproduct * weight + 2.0 * x * silu * dsquares
                dx = du * silu
                dgate = du * x * (sigmoid + silu * (1.0 - sigmoid))
                if WEIGHTED:
                    dweight += tl.sum(dproduct * x * silu, axis=0)
            else:
                dx = dproduct * weight * gate + 2.0 * x * dsquares
                dgate = dproduct * x * weight
                if WEIGHTED:
                    dweight += tl.sum(dproduct * x * gate, axis=0)
            tl.store(dgate_ptr + offset, dgate, mask=mask)
        else:
            dx = dproduct * weight + 2.0 * x * dsquares
            if WEIGHTED:
                dweight += tl.sum(dproduct * x, axis=0)
        tl.store(dx_ptr + offset, dx, mask=mask)
    if WEIGHTED:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * width + column, dweight, mask=column < width)


def _constants(width: int, *, backward: bool) -> dict[str, int]:
    block_width = min(triton.next_power_of_2(width), 1024)
    elements = 1024 if backward else 2048
    constants = {"BLOCK_ROWS": elements // block_width, "BLOCK_WIDTH": block_width, "num_warps": 4}
    return constants | ({"STAGES": 3} if backward else {})


def forward(x: Tensor, gate: Tensor | None, weight: Tensor | None, gate_first: bool) -> tuple[Tensor, Tensor]:
    """x, gate [rows, width] contiguous, weight [width] -> p in the dtype of gate, or x without, squares [rows] fp32."""
    rows, width = x.shape
    product = torch.empty_like(x if gate is None else gate)
    squares = x.new_empty(rows, dtype=torch.float32)
    constants = _constants(width, backward=False)
    forward_kernel[(triton.cdiv(rows, constants["BLOCK_ROWS"]),)](
        x,
        gate,
        weight,
        product,
        squares,
        rows,
        width,
        GATED=gate is not None,
        GATE_FIRST=gate_first,
        WEIGHTED=weight is not None,
        **constants,
    )
    return product, squares


def backward(
    dproduct: Tensor, dsquares: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor | None, gate_first: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dproduct, x, gate [rows, width] contiguous, dsquares [rows] fp32, weight [width] -> dx, dgate, dweight like x,
    gate, weight."""
    rows, width = x.shape
    dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
    constants = _constants(width, backward=True)
    tiles = triton.cdiv(width, constants["BLOCK_WIDTH"])
    segments = min(triton.cdiv(rows, constants["BLOCK_ROWS"]), max(1, PROGRAMS // tiles))
    partial = None if weight is None else x.new_empty(segments, width, dtype=torch.float32)
    backward_kernel[(segments, tiles)](
        dproduct,
        dsquares,
        x,
        gate,
        weight,
        dx,
        dgate,
        partial,
        rows,
        width,
        triton.cdiv(rows, segments),
        GATED=gate is not None,
        GATE_FIRST=gate_first,
        WEIGHTED=weight is not None,
        **constants,
    )
    return dx, dgate, None if partial is None or weight is None else column_sums(partial, weight.dtype)
