"""Norms by the largest and by the mean magnitude against their definitions; one index of a maximum has the gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalin.ops.norms.max_norm import (
    encoded_max_norm,
    encoded_max_norm_reference,
    max_norm,
    max_norm_reference,
    mean_magnitude_norm,
)
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

NORMS = {"max": max_norm, "mean": mean_magnitude_norm}


def definition(kind: str, x: Tensor, eps: float) -> Tensor:
    """The norm, row by row, with Python's `max`."""
    rows = []
    for row in x.flatten(0, -2):
        magnitude = max(row, key=abs).abs() if kind == "max" else sum(value.abs() for value in row) / len(row)
        rows.append(row / (magnitude + eps))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("eps", [1e-12, 1e-3, 0.5])
def test_values_and_gradient_equal_the_definition(kind: str, eps: float):
    x = {"x": torch.randn(3, 5, 12, dtype=torch.float64)}
    actual = outputs_and_gradients(lambda x: [NORMS[kind](x, eps=eps)], x)
    assert_close(actual, outputs_and_gradients(lambda x: [definition(kind, x, eps)], x), 1e-13)


def test_gradient_is_the_closed_form_and_goes_to_one_of_equal_maxima():
    """With M = max |x| + eps: dy / M, and at one index less sign(x) (sum dy x) / M^2."""
    x = torch.tensor([[0.5, -2.0, 2.0, 1.0], [3.0, 0.0, -1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 4, dtype=torch.float64)
    max_norm(x, eps=0.1).backward(dy)
    m = torch.tensor([2.1, 3.1], dtype=torch.float64)
    pull, rest = (dy * x.detach()).sum(-1) / m**2, x.grad - dy / m[:, None]
    assert rest[1, 0].item() == pytest.approx(-pull[1].item(), rel=1e-12)
    assert rest[1, 1:].abs().max() <= 1e-15
    (index,) = (rest[0].abs() > 1e-12).nonzero().flatten().tolist()
    assert index in (1, 2)
    assert rest[0, index].item() == pytest.approx(-x[0, index].sign().item() * pull[0].item(), rel=1e-12)


@pytest.mark.parametrize("kind", NORMS)
def test_zero_rows_give_zeros_and_pass_the_gradient_on(kind: str):
    x, dy = torch.zeros(2, 8, requires_grad=True), torch.randn(2, 8)
    y = NORMS[kind](x, eps=1e-3)
    y.backward(dy)
    assert y.eq(0).all()
    torch.testing.assert_close(x.grad, dy / 1e-3)


def test_a_scale_is_that_of_the_input():
    x, scale = {"x": torch.randn(3, 5, 12, dtype=torch.float64)}, torch.tensor(0.07, dtype=torch.float64)
    actual = outputs_and_gradients(lambda x: [max_norm(x, eps=0.1, scale=scale)], x)
    assert_close(actual, outputs_and_gradients(lambda x: [definition("max", x * scale, 0.1)], x), 1e-13)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_rounds_once(kind: str, dtype: torch.dtype):
    x = torch.randn(4, 64).to(dtype)
    assert torch.equal(NORMS[kind](x, eps=0.3), NORMS[kind](x.double(), eps=0.3).to(dtype))


@pytest.mark.parametrize("kind", NORMS)
def test_large_rows_of_half_precision_do_not_overflow(kind: str):
    x = torch.full((2, 64), 6e4, dtype=torch.float16, requires_grad=True)
    y = NORMS[kind](x, eps=1e-3)
    y.backward(torch.randn(2, 64).half())
    assert y.eq(1.0).all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 200), (70, 33), (2, 9000)])
@pytest.mark.parametrize("scale", [None, torch.tensor(0.03)])
def test_the_triton_kernel_is_as_good_as_the_reference(dtype: torch.dtype, rows: int, width: int, scale: Tensor | None):
    assert_as_good_as_the_reference(
        lambda x: [max_norm(x, eps=1e-2, scale=scale, backend="triton")],
        lambda x: [max_norm_reference(x, eps=1e-2, scale=scale)],
        {"x": torch.randn(rows, width).to(dtype)},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "length", "width", "heads"),
    [(2, 1, 64, 1), (2, 65, 48, 3), (2, 3, 9000, 5), (3, 5, 1024, 1), (2, 2, 12288, 2)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_encoded_triton_kernel_is_as_good_as_the_reference(
    dtype: torch.dtype, batch: int, length: int, width: int, heads: int, packed: bool
):
    """Rows of one position share a program if there are enough sequences to fill it; packed ones never do."""
    factor = torch.rand(batch, length)
    factor[1, -1] = 0.0
    positions = torch.arange(length) % 17
    if packed:
        positions = (positions + 7 * torch.arange(batch)[:, None]) % 17

    def run(function: Callable[..., Tensor], x: Tensor, **options: str | int) -> list[Tensor]:
        own = factor.to(torch.promote_types(x.dtype, torch.float32))
        return [function(x, own, positions, num_heads=heads, eps=1e-3, **options)]

    kernel = lambda x: run(encoded_max_norm, x, num_positions=17, backend="triton")  # noqa: E731
    x = torch.randn(batch, length, width).to(dtype)
    assert_as_good_as_the_reference(kernel, lambda x: run(encoded_max_norm_reference, x), {"x": x})
    found = outputs_and_gradients(kernel, {"x": x})
    assert found["output.0"][1, -1].eq(0).all()
    assert found["gradient.x"][1, -1].eq(0).all()


def test_the_first_of_equal_maxima_carries_the_gradient_in_the_kernel_too():
    x = {"x": torch.tensor([[0.5, -2.0, 2.0, 1.0], [3.0, 0.0, -1.0, 3.0]])}
    found = outputs_and_gradients(lambda x: [max_norm(x, eps=0.1, backend="triton")], x)
    expected = outputs_and_gradients(lambda x: [max_norm_reference(x, eps=0.1)], x)
    torch.testing.assert_close(found["gradient.x"], expected["gradient.x"])


def test_encoding_is_the_scale_and_the_cosine_of_the_normed_row():
    x, factor = torch.randn(2, 7, 12, dtype=torch.float64), torch.rand(2, 1, dtype=torch.float64)
    theta = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    cosine = torch.cos(torch.arange(7)[:, None] * theta).repeat(1, 3)
    expected = definition("max", x, 1e-3) * factor[..., None] * cosine
    found = encoded_max_norm(x, factor, torch.arange(7), num_positions=7, num_heads=3, eps=1e-3)
    torch.testing.assert_close(found, expected)
