"""Rows of e4m3 codes with power-of-two scales, and their matmul: against tables and exact arithmetic."""

import math

import pytest
import torch

from megalin.errors import OperandError
from megalin.ops.scaled_linear import (
    CODE_DTYPE,
    LARGEST_CODE,
    ScaledRows,
    finite_or_inf,
    quantize_rows,
    quantize_rows_reference,
    raise_to_magnitudes,
    row_magnitudes,
    row_scales,
    scaled_matmul,
)

EDGES = [448.0, 449.0, 448.0 * 2**-3, 447.99, 1.75, 1.7500001, 1.0, 3.3e38, 2.0**-126, 1e-40, 1e-45]


def equal_codes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def nearest_codes(scaled):
    """e4m3 codes of fp64 numbers by search in the table of all finite ones: nearest, ties to the even code."""
    table = torch.arange(127, dtype=torch.uint8).view(CODE_DTYPE).double()  # 0 to 448, by code
    magnitude = scaled.abs().clamp(max=LARGEST_CODE)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return code.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 7)


def exact_scale(magnitude):
    significand, exponent = math.frexp(magnitude)  # in [0.5, 1): 448 = 0.875 * 2^9
    return 2.0 ** max(exponent - 9 + (significand > 0.875), -126)


def test_scales_are_the_smallest_powers_of_two_that_hold_a_row():
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(0)).exp().pow(8)
    magnitudes = torch.cat([torch.tensor(EDGES), drawn])
    assert row_scales(magnitudes).tolist() == [exact_scale(m) for m in magnitudes.tolist()]


def test_a_zero_row_has_scale_one_and_zero_codes():
    codes, scales = quantize_rows(torch.zeros(2, 16))
    assert scales.tolist() == [1.0, 1.0]
    assert not codes.float().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_number_that_is_not_finite_is_nan_and_others_are_not(bad):
    x = torch.ones(3, 16)
    x[1, 5] = bad
    assert row_magnitudes(x).tolist() == [1.0, math.inf, 1.0]
    codes, scales = quantize_rows(x)
    assert scales.isnan().tolist() == [False, True, False]
    assert codes.float().isnan().all(1).tolist() == [False, True, False]
    y = scaled_matmul(ScaledRows(codes, scales), quantize_rows(torch.ones(16, 16)), torch.bfloat16)
    assert y.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**90])
def test_codes_of_all_bf16_numbers_are_the_nearest_ones(scale):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    codes, scales = quantize_rows(x[None], torch.tensor([448.0 * scale]))
    assert scales.item() == scale
    assert torch.equal(codes[0].view(torch.uint8), nearest_codes(x.double() / scale))


def test_a_row_of_all_ranks_has_the_codes_of_the_full_row():
    x = torch.randn(7, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    full, magnitudes = quantize_rows(x), row_magnitudes(x)
    shards = [quantize_rows(shard, magnitudes) for shard in x.chunk(4, dim=1)]
    assert equal_codes(torch.cat([shard.codes.view(torch.uint8) for shard in shards], 1), full.codes)
    assert all(torch.equal(shard.scales, full.scales) for shard in shards)


def draws(dtype):
    """Rows of very different magnitudes, one zero, with a transposed view."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(70, 50, generator=generator) * torch.randn(70, 1, generator=generator).mul(9).exp2()
    x[3] = 0.0
    return [x.to(dtype), x.to(dtype).t(), torch.stack([x, -x]).to(dtype)[1, ::2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_bits_of_the_reference(dtype):
    bad = draws(dtype)[0]
    bad[1, 2] = math.inf
    for x in (*draws(dtype), bad):
        magnitudes = row_magnitudes(x)
        found, expected = quantize_rows(x, backend="triton"), quantize_rows_reference(x, magnitudes)
        assert equal_codes(found.codes, expected.codes)
        assert torch.equal(found.scales.nan_to_num(-1.0), expected.scales.nan_to_num(-1.0))
        assert found.codes.is_contiguous()
        assert expected.codes.is_contiguous()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitudes_of_rows_and_columns_rise_to_those_of_a_matrix(dtype, backend):
    x = draws(dtype)[0]
    x[1, 2] = math.nan
    rows, columns = torch.zeros(70), torch.zeros(50)
    rows[0] = columns[4] = 1e30
    raise_to_magnitudes(x, rows, columns, backend=backend)
    for found, expected, index in ((rows, row_magnitudes(x), 0), (columns, row_magnitudes(x.t()), 4)):
        expected[index] = 1e30
        assert torch.equal(finite_or_inf(found), expected)


@pytest.mark.slow
def test_a_compiled_cast_gives_the_bits_of_the_reference():
    def cast(x, weight):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)  # fused with the cast
        return normed, *quantize_rows(normed), *quantize_rows(weight.t())

    x, weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(3)), draws(torch.bfloat16)[0]
    normed, codes, scales, weight_codes, weight_scales = torch.compile(cast, fullgraph=True)(x, weight)
    for rows, found in ((normed, (codes, scales)), (weight.t(), (weight_codes, weight_scales))):
        expected = quantize_rows_reference(rows, row_magnitudes(rows))
        assert equal_codes(found[0], expected.codes)
        assert torch.equal(found[1], expected.scales)


def test_the_matmul_multiplies_the_codes_exactly_in_fp64():
    generator = torch.Generator().manual_seed(4)
    a, b = (quantize_rows(torch.randn(size, 96, generator=generator)) for size in (20, 32))
    y = scaled_matmul(a, b, torch.float64)
    left, right = (rows.codes.double() * rows.scales.double()[:, None] for rows in (a, b))
    assert torch.equal(y, (left[:, None] * right).sum(-1))
    halves = [
        scaled_matmul(*(ScaledRows(r.codes[:, part], r.scales) for r in (a, b)), torch.float64)
        for part in (slice(0, 48), slice(48, 96))
    ]
    assert torch.equal(halves[0] + halves[1], y)  # the order of the sum does not matter
    narrow = scaled_matmul(a, b, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert ((narrow.double() - y).norm() / y.norm()).item() < 3e-3


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(OperandError, match=r"magnitudes has shape \(3,\) = \[R\], but R = 4"):
        quantize_rows(torch.ones(4, 16), torch.ones(3))
    with pytest.raises(OperandError, match=r"x has dtype torch\.int64"):
        quantize_rows(torch.ones(4, 16, dtype=torch.int64))
