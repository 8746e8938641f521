"""Gated product with FP8 rows: values as good as the reference's, codes with the bits of a cast of them."""

import math

import pytest
import torch

from megalin.errors import OperandError
from megalin.ops import quantized_gated_product as op
from megalin.ops.gates.gated_product import gated_product_reference
from megalin.ops.quantized_gated_product import quantized_gated_product, quantized_gated_product_backward
from megalin.ops.scaled_linear import quantize_rows_reference, row_magnitudes
from tests.numerics import relative_error

every_activation = pytest.mark.parametrize("activation", ["none", "silu"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def draw(dtype):
    """Rows of very different magnitudes, one zero, one with infinity; F = 37 ends inside of a tile."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(9, width, generator=generator) for width in (74, 37))
    x *= torch.randn(9, 1, generator=generator).mul(9).exp2()
    x[3] = 0.0
    return x.to(dtype), dy.to(dtype)


def assert_rows_are_a_cast(found):
    expected = quantize_rows_reference(found.tensor, row_magnitudes(found.tensor))
    assert torch.equal(found.rows.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.rows.scales.nan_to_num(-1.0), expected.scales.nan_to_num(-1.0))


@every_activation
@every_dtype
def test_the_kernel_gives_the_product_and_its_gradient_with_the_codes_of_a_cast(activation, dtype):
    x, dy = draw(dtype)
    leaf = x.double().requires_grad_()
    truth = gated_product_reference(leaf, activation=activation)
    (gradient,) = torch.autograd.grad(truth, leaf, dy.double())
    for backend in ("triton", "reference"):
        product = quantized_gated_product(x, activation=activation, backend=backend)
        dx = quantized_gated_product_backward(dy, x, activation=activation, backend=backend)
        for found, exact in ((product, truth.detach()), (dx, gradient)):
            assert_rows_are_a_cast(found)
            assert found.tensor.dtype == dtype
            assert relative_error(found.tensor, exact) < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_a_number_that_is_not_finite_has_nan_codes_and_others_have_not(bad):
    x, dy = draw(torch.bfloat16)
    x[5, 40] = bad
    for found in (
        quantized_gated_product(x, activation="none", backend="triton"),
        quantized_gated_product_backward(dy, x, activation="none", backend="triton"),
    ):
        assert_rows_are_a_cast(found)
        assert found.rows.codes.float().isnan().all(1).nonzero().flatten().tolist() == [5]


def test_a_row_wider_than_the_kernel_takes_the_reference():
    x = torch.empty(1, 2, dtype=torch.bfloat16)
    assert op._unsupported(x, op.LARGEST_WIDTH) == ""
    assert op._unsupported(x, op.LARGEST_WIDTH + 1) == "16385 columns of the product, more than 16384"


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(OperandError, match=r"gate_value has shape \(4, 4\) = \[R, W\], but R = 3"):
        quantized_gated_product_backward(torch.ones(3, 2), torch.ones(4, 4), activation="none")
    with pytest.raises(OperandError, match=r"\(4, 4\); its width must be twice that of dproduct, \(4, 3\)"):
        quantized_gated_product_backward(torch.ones(4, 3), torch.ones(4, 4), activation="none")
    with pytest.raises(OperandError, match=r"\(4, 5\); its width must be even"):
        quantized_gated_product(torch.ones(4, 5), activation="none")


def test_the_kernels_take_strided_operands():
    def run(x, dy):
        product = quantized_gated_product(x, activation="silu", backend="triton")
        dx = quantized_gated_product_backward(dy, x, activation="silu", backend="triton")
        return product.tensor, dx.tensor

    contiguous = draw(torch.float32)
    strided = [torch.stack([tensor, -tensor], -1)[..., 0] for tensor in contiguous]
    assert all(torch.equal(*pair) for pair in zip(run(*contiguous), run(*strided), strict=True))
