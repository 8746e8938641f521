"""v = sigmoid(c W^T + b) x with c of a few channels: the gate is formed where it is used, and never stored.

Bytes: forward reads x and writes v; backward reads x and dv and writes dx and the gradient of the gate's logits, with
one partial sum a tile of rows for b. c and W are small beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _tile(
    x_ptr, code_ptr, weight_ptr, bias_ptr, x_row, code_row, rows, width,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """This program's rows, columns and mask, x, and the gate."""
    row = (tl.program_id(0) // tl.cdiv(width, BLOCK_WIDTH)).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % tl.cdiv(width, BLOCK_WIDTH) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inner = tl.arange(0, BLOCK_RANK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=mask, other=0.0)
    at = code_ptr + row[:, None] * code_row + inner[None, :]
    code = tl.load(at, mask=(row < rows)[:, None] & (inner < RANK)[None, :], other=0.0)
    at = weight_ptr + column[:, None] * RANK + inner[None, :]
    weight = tl.load(at, mask=(column < width)[:, None] & (inner < RANK)[None, :], other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    logits = tl.dot(code, tl.trans(weight), input_precision="ieee") + bias[None, :]
    return row, column, mask, x.to(tl.float32), tl.sigmoid(logits)


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, code_ptr, weight_ptr, bias_ptr, y_ptr, x_row, code_row, rows, width,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    row, column, mask, x, gate = _tile(
        x_ptr, code_ptr, weight_ptr, bias_ptr, x_row, code_row, rows, width, RANK, BLOCK_RANK, BLOCK_ROWS, BLOCK_WIDTH
    )
    tl.store(y_ptr + row[:, None] * width + column[None, :], gate * x, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr, x_ptr, code_ptr, weight_ptr, bias_ptr, dx_ptr, dlogits_ptr, partial_ptr,  # partial [tiles, D] fp32
    dy_row, x_row, code_row, rows, width,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    row, column, mask, x, gate = _tile(
        x_ptr, code_ptr, weight_ptr, bias_ptr, x_row, code_row, rows, width, RANK, BLOCK_RANK, BLOCK_ROWS, BLOCK_WIDTH
    )
    dy = tl.load(dy_ptr + row[:, None] * dy_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    dx = dy * gate
    dlogits = dx * x * (1.0 - gate)
    offset = row[:, None] * width + column[None, :]
    tl.store(dx_ptr + offset, dx, mask=mask)
    tl.store(dlogits_ptr + offset, dlogits, mask=mask)
    tile = (tl.program_id(0) // tl.cdiv(width, BLOCK_WIDTH)).to(tl.int64)
    tl.store(partial_ptr + tile * width + column, tl.sum(dlogits, axis=0), mask=column < width)


def _constants(rank: int, dtype: torch.dtype, *, backward: bool) -> dict[str, int]:
    rows, warps = (32, 4) if dtype == torch.float32 else (32, 2) if backward else (64, 4)
    block = max(16, triton.next_power_of_2(rank))
    return {"RANK": rank, "BLOCK_RANK": block, "BLOCK_ROWS": rows, "BLOCK_WIDTH": 64, "num_warps": warps}


def forward(x: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [rows, D] and code [rows, L] of contiguous rows, weight [D, L] and bias [D] contiguous, all of one dtype but
    the bias -> [rows, D]."""
    rows, width = x.shape
    y, constants = x.new_empty(rows, width), _constants(code.shape[1], x.dtype, backward=False)
    programs = triton.cdiv(rows, constants["BLOCK_ROWS"]) * triton.cdiv(width, constants["BLOCK_WIDTH"])
    forward_kernel[(programs,)](x, code, weight, bias, y, x.stride(0), code.stride(0), rows, width, **constants)
    return y


def backward(dy: Tensor, x: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx and the gradient of the logits [rows, D], and that of the bias; dy as x."""
    rows, width = x.shape
    dx, dlogits = x.new_empty(rows, width), x.new_empty(rows, width)
    constants = _constants(code.shape[1], x.dtype, backward=True)
    tiles = triton.cdiv(rows, constants["BLOCK_ROWS"])
    partial = x.new_empty(tiles, width, dtype=torch.float32)
    backward_kernel[(tiles * triton.cdiv(width, constants["BLOCK_WIDTH"]),)](
        dy, x, code, weight, bias, dx, dlogits, partial, dy.stride(0), x.stride(0), code.stride(0), rows, width,
        **constants,
    )  # fmt: skip
    return dx, dlogits, partial.sum(0).to(bias.dtype)


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, int], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    cases = []
    for rank in (16, 32, 128):
        for kernel in (forward_kernel, backward_kernel):
            constants = _constants(rank, torch.bfloat16, backward=kernel is backward_kernel)
            types = {
                name: "i32" if not name.endswith("_ptr") else "*fp32" if name == "partial_ptr" else "*bf16"
                for name in kernel.arg_names
                if name.islower()
            }
            options = {"num_warps": constants.pop("num_warps")}
            cases.append((kernel, types, constants, options))
    return cases
