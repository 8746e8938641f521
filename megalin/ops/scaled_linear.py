"""Matmuls of e4m3 rows with power-of-two scales: the operands and the arithmetic of FP8 linears.

    m_r = max_k |x_rk|        s_r = 2^ceil(log2(m_r / 448))        c_rk = e4m3(x_rk / s_r)        x_rk ~ s_r c_rk

    scaled_matmul: y_rn = s_r t_n sum_k c_rk d_nk        of rows (c, s) and (d, t)

A row's scale depends on that row alone, so a token's codes do not depend on the other tokens of a batch. Scales come
from the exponent bits of m, and dividing by a power of two is exact: codes have the same bits on every backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.fusion import left_to_inductor
from megalin.ops.dispatch.operands import Case, check_operands, static
from megalin.ops.dispatch.self_test import ROWS, sample

OP = "quantize_rows"
CODE_DTYPE = torch.float8_e4m3fn
LARGEST_CODE = 448.0
"""Largest finite e4m3 number, 1.75 * 2^8."""
LOWEST_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply FP8 numbers."""

_MANTISSA_BITS, _BIAS = 23, 127
_ROUND_UP = (1 << 21) - 1
"""Added to the bits of an fp32 number, carries into its exponent where the significand exceeds 1.75."""
_INFINITY = 0x7F800000
_SMALLEST, _ONE = 1, _BIAS
"""Exponent fields of 2^-126, the smallest scale, whose inverse is a normal number too, and of 1."""


class ScaledRows(NamedTuple):
    """A matrix as codes and one scale a row."""

    codes: Tensor
    """[R, K] e4m3, contiguous."""
    scales: Tensor
    """[R] fp32, powers of two; NaN for a row with a number that is not finite, whose codes are NaN as well."""


def row_magnitudes(x: Tensor) -> Tensor:
    """max_k |x_rk|: x [..., K] -> [...] fp32; infinite for a row with a number that is not finite, so that the maximum
    over ranks is too."""
    return finite_or_inf(x.abs().amax(-1).to(torch.float32))


def finite_or_inf(magnitudes: Tensor) -> Tensor:
    """Magnitudes with infinity in place of NaN, which a maximum over ranks may lose."""
    return torch.where(magnitudes.isfinite(), magnitudes, torch.inf)


def row_scales(magnitudes: Tensor) -> Tensor:
    """s = 2^ceil(log2(m / 448)) of magnitudes m [...] fp32, from their bits: 1 for 0, NaN for infinity, and at least
    2^-126."""
    field = _scale_field(magnitudes)
    scales = (field << _MANTISSA_BITS).view(torch.float32)
    return torch.where(magnitudes.isfinite(), scales, torch.nan)


def quantize_rows(
    x: Tensor, magnitudes: Tensor | None = None, *, stored: bool = False, backend: Backend = "auto"
) -> ScaledRows:
    """Quantises the rows of x [R, K], which may be a transposed view, to e4m3: rounds to nearest even and saturates.

    Args:
        magnitudes: [R] fp32, `row_magnitudes` of the full rows where x holds a shard of each; None: those of x.
        stored: x lies in memory, as weights do: compiled blocks run the kernel, 1.8 to 2.8 times as fast as inductor's
            cast. False: they leave the cast to inductor, which fuses it with what computes x.
        backend: implementation to run; the kernel takes fp32, bf16 and fp16.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    check_operands(OP, {"x": (x, "RK"), "magnitudes": (magnitudes, "R")})
    if magnitudes is None:
        magnitudes = row_magnitudes(x)
    if not stored and left_to_inductor(OP, backend):
        return quantize_rows_reference(x, magnitudes)
    if backends.choose(OP, backend, x.device.type, _unsupported(x), case=_case(x)) == "reference":
        return quantize_rows_reference(x, magnitudes)
    return ScaledRows(_quantize(x, magnitudes), row_scales(magnitudes))


def quantize_rows_reference(x: Tensor, magnitudes: Tensor) -> ScaledRows:
    """`quantize_rows` in plain PyTorch: tests the kernel, runs on CPUs and in compiled blocks."""
    inverse = ((2 * _BIAS - _scale_field(magnitudes)) << _MANTISSA_BITS).view(torch.float32)
    inverse = torch.where(magnitudes.isfinite(), inverse, torch.nan)
    scaled = x.to(compute_dtype(x)) * inverse[:, None]  # exact
    codes = scaled.clamp(-LARGEST_CODE, LARGEST_CODE).to(CODE_DTYPE)
    return ScaledRows(codes.contiguous(), row_scales(magnitudes))


@torch.no_grad()
def raise_to_magnitudes(x: Tensor, rows: Tensor, columns: Tensor, *, backend: Backend = "auto") -> None:
    """Raises rows [R] and columns [K], fp32 and not negative, in place to the magnitudes of the rows and the columns of
    x [R, K] where those are larger. The kernel reads x once; the result does not depend on the order of its parts.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    check_operands(OP, {"x": (x, "RK"), "rows": (rows, "R"), "columns": (columns, "K")})
    if backends.choose(OP, backend, x.device.type, _unsupported(x), case=_case(x)) == "reference":
        for dim, magnitudes in ((1, rows), (0, columns)):
            magnitudes.copy_(torch.maximum(magnitudes, x.abs().amax(dim).to(torch.float32)))
    else:
        _raise_to_magnitudes(x, rows, columns)


def _raise_to_magnitudes(x: Tensor, rows: Tensor, columns: Tensor) -> None:
    from megalin._triton import scaled_linear as kernels

    kernels.raise_to_magnitudes(x.contiguous(), rows, columns)


def scaled_matmul(a: ScaledRows, b: ScaledRows, dtype: torch.dtype) -> Tensor:
    """y = A B^T of rows A [M, K] and B [N, K] -> [M, N] in `dtype`.

    On a GPU in bf16: `torch._scaled_mm`, which accumulates in less than fp32 inside of a tensor core's tile ("fast
    accumulation") and in fp32 across them; K and N are multiples of `ALIGNMENT`. Otherwise codes are multiplied as fp32
    numbers, or as fp64 numbers where `dtype` is fp64: exactly then, in any order of the sum, up to K = 2^17.
    """
    if dtype == torch.bfloat16 and (a.codes.is_cuda or backends.kernels_assumed()):
        return torch._scaled_mm(
            a.codes, b.codes.t(), a.scales[:, None], b.scales[None, :], out_dtype=dtype, use_fast_accum=True
        )
    wide = torch.promote_types(dtype, torch.float32)
    y = a.codes.to(wide) @ b.codes.to(wide).t()
    return (y * a.scales[:, None].to(wide) * b.scales.to(wide)).to(dtype)


def _case(x: Tensor) -> Case:
    """Properties of x [R, K] that select the kernels' code: its dtype, and the size of its contiguous dimension."""
    by_rows = static(x.stride(1)) == 1
    return (("contiguous", static(x.shape[1] if by_rows else x.shape[0])), ("by_rows", by_rows), ("x", x.dtype))


def _unsupported(x: Tensor) -> str:
    return f"dtype {x.dtype}" if x.dtype not in KERNEL_DTYPES else "an empty tensor" if x.numel() == 0 else ""


def _scale_field(magnitudes: Tensor) -> Tensor:
    """The exponent field of the scale of each magnitude, int32. 448 = 1.75 * 2^8: the magnitude's exponent less 8, and
    one more where its significand exceeds 1.75."""
    bits = magnitudes.view(torch.int32)
    field = ((bits + _ROUND_UP) >> _MANTISSA_BITS) - 8
    return torch.where(bits == 0, _ONE, field.clamp(min=_SMALLEST))


@custom_op(OP, lambda x, _: torch.empty(x.shape, dtype=CODE_DTYPE, device=x.device))
def _quantize(x: Tensor, magnitudes: Tensor) -> Tensor:
    from megalin._triton import scaled_linear as kernels

    return kernels.quantize(x, magnitudes.contiguous())


@torch.no_grad()
def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """The same bits as the reference, of rows or of columns, with magnitudes from 2^-140 to 2^120 in fp32, and such as
    other dtypes have."""
    count, width, dtype = ROWS, case["contiguous"], case["x"]
    lowest, highest = {torch.float32: (-140, 120), torch.bfloat16: (-110, 110)}.get(dtype, (-8, 8))
    exponents = torch.linspace(lowest, highest, count, device=device).int()
    x = sample(count, width, device=device) * torch.ldexp(torch.ones(count, device=device), exponents)[:, None]
    x = x.to(dtype)
    rows = x if case["by_rows"] else x.t()
    magnitudes = row_magnitudes(rows)
    found = _quantize(rows, magnitudes).view(torch.uint8)
    expected = quantize_rows_reference(rows, magnitudes).codes.view(torch.uint8)
    if wrong := int((found != expected).sum()):
        return f"self-test: {wrong} of {expected.numel()} codes differ from the reference"
    found_rows, found_columns = torch.zeros(count, device=device), torch.zeros(width, device=device)
    _raise_to_magnitudes(x, found_rows, found_columns)
    if not (torch.equal(found_rows, row_magnitudes(x)) and torch.equal(found_columns, row_magnitudes(x.t()))):
        return "self-test: magnitudes of rows or columns differ from the reference"
    return ""


backends.register(OP, ("triton",), _self_test)
