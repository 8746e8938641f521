"""Cast of rows to e4m3 with power-of-two scales: c = e4m3(x / 2^ceil(log2(m / 448))), m the magnitude of the row.

Bytes: reads x and one magnitude a row, writes one byte an element. x may be a transposed view; codes are contiguous.
Magnitudes of the rows and the columns of a weight: reads it once.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

TILE = {"ROWS": 32, "COLUMNS": 128, "num_warps": 8}


@triton.jit
def _code(scaled):
    """The e4m3 bits of an fp32 number: to nearest even, saturating; 0x7F for NaN.

    By integer arithmetic: every chip and the interpreter give the same bits. Adding 2^14 to a number below 2^-6 rounds
    it to a multiple of 2^-9, the step of e4m3 there.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    step = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(magnitude < 0x3C800000, step, tl.minimum(normal, 0x7E))
    return sign | tl.where(magnitude > 0x7F800000, 0x7F, code)


@triton.jit
def encode(scaled, NATIVE: tl.constexpr):
    """`_code` as uint8; NATIVE: by the chip's own conversion, from compute capability 8.9, with the same bits."""
    if NATIVE:
        saturated = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        code = saturated.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(scaled != scaled, 0x7F, code).to(tl.uint8)
    return _code(scaled).to(tl.uint8)


def has_native_codes(x: Tensor) -> bool:
    """Whether the chip of x converts to e4m3 itself."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


@triton.jit
def scale_and_inverse(bits):
    """2^ceil(log2(m / 448)) and its inverse of a magnitude m >= 0 by the bits of fp32, at least 2^-126; 1 for zero; NaN
    for infinity and NaN."""
    field = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)  # a significand above 1.75 carries into the exponent
    field = tl.where(bits == 0, 127, field)
    scale = tl.where(bits >= 0x7F800000, 0x7FC00000, field << 23)
    inverse = tl.where(bits >= 0x7F800000, 0x7FC00000, (254 - field) << 23)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x_ptr, magnitudes_ptr, codes_ptr, rows, columns, row_stride, column_stride,
    NATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    bits = tl.load(magnitudes_ptr + row, mask=row < rows, other=0.0).to(tl.int32, bitcast=True)
    _, inverse = scale_and_inverse(bits)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    source = x_ptr + row[:, None] * row_stride + column[None, :] * column_stride
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    target = codes_ptr + row[:, None] * columns + column[None, :]
    tl.store(target, encode(x * inverse[:, None], NATIVE), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def magnitudes_kernel(x_ptr, outputs_ptr, inputs_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(outputs_ptr + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")
    tl.atomic_max(inputs_ptr + column, tl.max(bits, axis=0), mask=column < columns, sem="relaxed")


def raise_to_magnitudes(x: Tensor, outputs: Tensor, inputs: Tensor) -> None:
    """Raises outputs [R] and inputs [K], fp32 and not negative, to max |x| over the rows and the columns of x [R, K],
    which is contiguous. The bits of such numbers order as the numbers do."""
    rows, columns = x.shape
    grid = triton.cdiv(rows, TILE["ROWS"]), triton.cdiv(columns, TILE["COLUMNS"])
    magnitudes_kernel[grid](x, outputs.view(torch.int32), inputs.view(torch.int32), rows, columns, **TILE)


def quantize(x: Tensor, magnitudes: Tensor) -> Tensor:
    """x [R, K] with any strides, magnitudes [R] fp32 -> codes [R, K] e4m3."""
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    grid = triton.cdiv(rows, TILE["ROWS"]), triton.cdiv(columns, TILE["COLUMNS"])
    quantize_kernel[grid](x, magnitudes, codes, rows, columns, *x.stride(), has_native_codes(x), **TILE)
    return codes.view(torch.float8_e4m3fn)
