"""Computes v = sigmoid(c W^T + b) x with c of a few channels; the gate is computed in registers and never stored.

Bytes: forward reads x and writes v; backward reads x and dv and writes dx; c and W are small. Each backward program
iterates over a segment of rows for a tile of columns, accumulates partial gradients of W and b, and writes a partial
gradient of c for every row, fp32 [tiles, rows, L]. The partial sums are added afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

PROGRAMS = 1056
"""Programs of the backward, eight per multiprocessor of an H200."""


@triton.jit
def _columns(weight_ptr, bias_ptr, column, inner, width, RANK: tl.constexpr):
    """Loads W [columns, L] and b of these columns."""
    mask = (column < width)[:, None] & (inner < RANK)[None, :]
    weight = tl.load(weight_ptr + column[:, None] * RANK + inner[None, :], mask=mask, other=0.0)
    return weight, tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _gate(code, weight, bias):
    return tl.sigmoid(tl.dot(code, tl.trans(weight), input_precision="ieee") + bias[None, :])


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, code_ptr, weight_ptr, bias_ptr, y_ptr, x_row, code_row, rows, width,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tl.cdiv(width, BLOCK_WIDTH)).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % tl.cdiv(width, BLOCK_WIDTH) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inner = tl.arange(0, BLOCK_RANK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    known = (row < rows)[:, None] & (inner < RANK)[None, :]
    code = tl.load(code_ptr + row[:, None] * code_row + inner[None, :], mask=known, other=0.0)
    gate = _gate(code, *_columns(weight_ptr, bias_ptr, column, inner, width, RANK))
    tl.store(y_ptr + row[:, None] * width + column[None, :], gate * x, mask=mask)


@triton.jit(do_not_specialize=["rows", "segment_rows"])
def backward_kernel(
    dy_ptr, x_ptr, code_ptr, weight_ptr, bias_ptr,
    dx_ptr, dcode_ptr, dweight_ptr, dbias_ptr,  # [rows, D]; partial: [tiles, rows, L], [segments, D, L], [segments, D]
    dy_row, x_row, code_row, rows, width, segment_rows,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1).to(tl.int64) * segment_rows
    end = tl.minimum(first + segment_rows, rows)
    column, inner = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_RANK)
    weight, bias = _columns(weight_ptr, bias_ptr, column, inner, width, RANK)
    dweight = tl.zeros([BLOCK_WIDTH, BLOCK_RANK], tl.float32)
    dbias = tl.zeros([BLOCK_WIDTH], tl.float32)
    for start in range(0, segment_rows, BLOCK_ROWS):
        row = first + start + tl.arange(0, BLOCK_ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        known = (row < end)[:, None] & (inner < RANK)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        code = tl.load(code_ptr + row[:, None] * code_row + inner[None, :], mask=known, other=0.0)
        gate = _gate(code, weight, bias)
        dx = dy * gate
        dlogits = dx * x * (1.0 - gate)
        tl.store(dx_ptr + row[:, None] * width + column[None, :], dx, mask=mask)
        dbias += tl.sum(dlogits, axis=0)
        rounded = dlogits.to(code.dtype)
        dcode = tl.dot(rounded, weight, input_precision="ieee")
        at = (tl.program_id(0).to(tl.int64) * rows + row)[:, None] * RANK + inner[None, :]
        tl.store(dcode_ptr + at, dcode, mask=known)
        dweight = tl.dot(tl.trans(rounded), code, dweight, input_precision="ieee")
    at = tl.program_id(1).to(tl.int64) * width + column
    tl.store(dbias_ptr + at, dbias, mask=column < width)
    mask = (column < width)[:, None] & (inner < RANK)[None, :]
    tl.store(dweight_ptr + at[:, None] * RANK + inner[None, :], dweight, mask=mask)


def _constants(rank: int, dtype: torch.dtype, *, backward: bool) -> dict[str, int]:
    block = max(32 if backward else 16, triton.next_power_of_2(rank))  # 4 warps share no columns of 16
    if backward:
        rows, width = 16, 128 if block <= 64 and dtype != torch.float32 else 64
    else:
        rows, width = 32 if dtype == torch.float32 else 64, 64
    return {"RANK": rank, "BLOCK_RANK": block, "BLOCK_ROWS": rows, "BLOCK_WIDTH": width, "num_warps": 4}


def forward(x: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [rows, D] and code [rows, L] with contiguous rows, weight [D, L] and bias [D] contiguous, all but the bias of
    one dtype -> [rows, D]."""
    rows, width = x.shape
    y, constants = x.new_empty(rows, width), _constants(code.shape[1], x.dtype, backward=False)
    programs = triton.cdiv(rows, constants["BLOCK_ROWS"]) * triton.cdiv(width, constants["BLOCK_WIDTH"])
    forward_kernel[(programs,)](x, code, weight, bias, y, x.stride(0), code.stride(0), rows, width, **constants)
    return y


def backward(
    dy: Tensor, x: Tensor, code: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, code, weight and bias; dy as x."""
    rows, width = x.shape
    rank, constants = code.shape[1], _constants(code.shape[1], x.dtype, backward=True)
    tiles = triton.cdiv(width, constants["BLOCK_WIDTH"])
    blocks = triton.cdiv(rows, constants["BLOCK_ROWS"])
    segments = min(blocks, triton.cdiv(PROGRAMS, tiles))
    segment_rows = triton.cdiv(blocks, segments) * constants["BLOCK_ROWS"]
    dx = x.new_empty(rows, width)
    dcode = x.new_empty(tiles, rows, rank, dtype=torch.float32)
    dweight = x.new_empty(segments, width, rank, dtype=torch.float32)
    dbias = x.new_empty(segments, width, dtype=torch.float32)
    backward_kernel[(tiles, segments)](
        dy, x, code, weight, bias, dx, dcode, dweight, dbias, dy.stride(0), x.stride(0), code.stride(0), rows, width,
        segment_rows, **constants,
    )  # fmt: skip
    partials = ((dcode, code), (dweight, weight), (dbias, bias))
    return dx, *(partial.sum(0).to(operand.dtype) for partial, operand in partials)
