"""Gated product with e4m3 codes: p = act(g) v of one projection [g | v], and the codes of p or of [dg | dv].

One program computes a full row in registers, so that its magnitude is known before the codes are written.
Bytes: those of `gated_product`, and one more for each code.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.gates.gated_product import gradients_of, product_of
from megalin._triton.scaled_linear import encode, has_native_codes, scale_and_inverse

FORWARD_WARP, BACKWARD_WARP = 512, 256
"""Columns of a warp."""


@triton.jit
def _magnitude_bits(rounded):
    """Bits of max |x|, as an integer: not below those of infinity for a row with a number that is not finite."""
    return tl.max(rounded.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def _load_row(gate_value_ptr, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = column < width
    source = gate_value_ptr + row * (2 * width) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    return row, column, mask, gate, value


@triton.jit
def forward_kernel(
    gate_value_ptr, product_ptr, codes_ptr, scales_ptr, width,
    SILU: tl.constexpr, NATIVE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, column, mask, gate, value = _load_row(gate_value_ptr, width, COLUMNS)
    product = product_of(gate, value, SILU).to(product_ptr.dtype.element_ty)
    tl.store(product_ptr + row * width + column, product, mask=mask)
    scale, inverse = scale_and_inverse(_magnitude_bits(product))
    tl.store(scales_ptr + row, scale)
    tl.store(codes_ptr + row * width + column, encode(product.to(tl.float32) * inverse, NATIVE), mask=mask)


@triton.jit
def backward_kernel(
    dproduct_ptr, gate_value_ptr, dgate_value_ptr, codes_ptr, scales_ptr, width,
    SILU: tl.constexpr, NATIVE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, column, mask, gate, value = _load_row(gate_value_ptr, width, COLUMNS)
    dproduct = tl.load(dproduct_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    dgate, dvalue = gradients_of(dproduct, gate, value, SILU)
    dgate, dvalue = dgate.to(dgate_value_ptr.dtype.element_ty), dvalue.to(dgate_value_ptr.dtype.element_ty)
    target = row * (2 * width) + column
    tl.store(dgate_value_ptr + target, dgate, mask=mask)
    tl.store(dgate_value_ptr + target + width, dvalue, mask=mask)
    scale, inverse = scale_and_inverse(tl.maximum(_magnitude_bits(dgate), _magnitude_bits(dvalue)))
    tl.store(scales_ptr + row, scale)
    tl.store(codes_ptr + target, encode(dgate.to(tl.float32) * inverse, NATIVE), mask=mask)
    tl.store(codes_ptr + target + width, encode(dvalue.to(tl.float32) * inverse, NATIVE), mask=mask)


def forward(gate_value: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """gate_value [rows, 2 F] contiguous -> p [rows, F], its codes [rows, F] e4m3 and scales [rows] fp32."""
    rows, width = gate_value.shape[0], gate_value.shape[1] // 2
    product = gate_value.new_empty(rows, width)
    codes, scales = _empty_rows(product)
    tile, native = _tile(width, FORWARD_WARP), has_native_codes(gate_value)
    forward_kernel[(rows,)](gate_value, product, codes, scales, width, silu, native, **tile)
    return product, codes.view(torch.float8_e4m3fn), scales


def backward(dproduct: Tensor, gate_value: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dp [rows, F], gate_value [rows, 2 F], contiguous -> the gradient of gate_value, its codes and scales."""
    rows, width = dproduct.shape
    dgate_value = gate_value.new_empty(gate_value.shape)
    codes, scales = _empty_rows(dgate_value)
    tile = _tile(width, BACKWARD_WARP)
    backward_kernel[(rows,)](
        dproduct, gate_value, dgate_value, codes, scales, width, silu, has_native_codes(gate_value), **tile
    )
    return dgate_value, codes.view(torch.float8_e4m3fn), scales


def _empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.uint8), torch.empty(len(x), dtype=torch.float32, device=x.device)


def _tile(width: int, columns_per_warp: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "num_warps": max(1, min(32, columns // columns_per_warp))}
