"""SRMSNorm against its definition, and at the limits of the number range."""

import pytest
import torch

from megalin.ops.norms.srmsnorm import srmsnorm, srmsnorm_reference
from tests.numerics import assert_close, errors, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def definition(x: torch.Tensor, eps: float) -> torch.Tensor:
    """SRMSNorm, row by row; test_gradient_is_the_closed_form has its gradient."""
    rows = [row / ((row * row).sum() / row.numel() + eps) ** 0.5 for row in x.flatten(0, -2)]
    return torch.stack(rows).view_as(x)


def test_values_and_gradient_equal_the_definition():
    x = {"x": torch.randn(3, 5, 12, dtype=torch.float64)}
    for eps in (1e-6, 0.3):
        actual = outputs_and_gradients(lambda x, e=eps: [srmsnorm(x, eps=e)], x)
        assert_close(actual, outputs_and_gradients(lambda x, e=eps: [definition(x, e)], x), 1e-13)


def test_gradient_is_the_closed_form():
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    y, dy = srmsnorm(x, eps=1e-2), torch.randn(4, 12, dtype=torch.float64)
    y.backward(dy)
    r = (x.detach().square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    unit = x.detach() * r
    torch.testing.assert_close(x.grad, r * (dy - unit * (unit * dy).mean(-1, keepdim=True)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_rows_give_zeros_and_a_bounded_gradient(dtype):
    x = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    y = srmsnorm(x, eps=1e-6)
    y.sum().backward()
    assert y.eq(0).all()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() <= 1.01e3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_rows_do_not_overflow(dtype):
    x = torch.full((2, 8), 1e4, dtype=dtype, requires_grad=True)
    y = srmsnorm(x, eps=1e-6)
    y.backward(torch.randn(2, 8).to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), torch.ones(2, 8), rtol=1e-3, atol=0)
    assert x.grad.isfinite().all()


def test_rows_are_independent():
    x = torch.randn(3, 8)
    changed = x.clone()
    changed[0] *= 1e4
    assert torch.equal(srmsnorm(x, eps=1e-6)[1:], srmsnorm(changed, eps=1e-6)[1:])


def test_bf16_rounds_inputs_and_outputs_only():
    x = {"x": torch.randn(64, 48, dtype=torch.bfloat16)}
    truth = outputs_and_gradients(lambda x: [srmsnorm(x, eps=1e-6)], {"x": x["x"].double()})
    found = errors(outputs_and_gradients(lambda x: [srmsnorm(x, eps=1e-6)], x), truth)
    assert found["output.0"] <= 2e-3  # one rounding; squares in bf16 give 3e-3
    assert found["gradient.x"] <= 3e-3  # two


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 200), (130, 33), (2, 12300)])
def test_the_triton_kernel_is_as_good_as_the_reference(dtype, rows, width):
    x = {"x": torch.randn(rows, width).to(dtype)}
    assert_as_good_as_the_reference(
        lambda x: [srmsnorm(x, eps=1e-6, backend="triton")], lambda x: [srmsnorm_reference(x, eps=1e-6)], x
    )


def test_the_triton_kernel_takes_strided_rows():
    x = {"x": torch.randn(6, 4, 40)}
    assert_as_good_as_the_reference(
        lambda x: [srmsnorm(x.transpose(0, 1)[..., ::2], eps=1e-6, backend="triton")],
        lambda x: [srmsnorm_reference(x.transpose(0, 1)[..., ::2], eps=1e-6)],
        x,
    )
