"""Gated values and sums of squares of a gated norm against their definition, in PyTorch and Triton, with gradients."""

import itertools

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.norms.gated_squares import gated_squares, gated_squares_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

FORMS = list(itertools.product((False, True), repeat=3))


def _inputs(gated, weighted, rows, width, dtype, x_dtype=None):
    found = {"x": torch.randn(rows, width).to(x_dtype or dtype)}
    if gated:
        found["gate"] = torch.randn(rows, width).to(dtype)
    return found | ({"weight": torch.randn(width).to(dtype)} if weighted else {})


def definition(x, gate=None, weight=None, *, gate_first):
    gate = torch.ones_like(x) if gate is None else gate / (1 + (-gate).exp()) if gate_first else gate
    weight = torch.ones(x.shape[-1], dtype=x.dtype) if weight is None else weight
    normed = x * gate if gate_first else x
    return [x * gate * weight, (normed * normed).sum(-1)]


@pytest.mark.parametrize(("gated", "weighted", "gate_first"), FORMS)
def test_values_and_gradients_equal_the_definition(gated, weighted, gate_first):
    inputs = _inputs(gated, weighted, 5, 12, torch.float64)
    expected = outputs_and_gradients(lambda **x: definition(**x, gate_first=gate_first), inputs)
    assert_close(outputs_and_gradients(lambda **x: gated_squares(**x, gate_first=gate_first), inputs), expected, 1e-13)


@pytest.mark.parametrize(("gated", "weighted", "gate_first"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_triton_kernel_is_as_good_as_the_reference(gated, weighted, gate_first, dtype):
    for rows, width in ((1, 64), (70, 33), (3, 1300)):
        assert_as_good_as_the_reference(
            lambda **x: gated_squares(**x, gate_first=gate_first, backend="triton"),
            lambda **x: gated_squares_reference(**x, gate_first=gate_first),
            _inputs(gated, weighted, rows, width, dtype),
        )


def test_rows_of_a_wider_dtype_than_their_gate_are_taken():
    inputs = _inputs(True, True, 5, 64, torch.bfloat16, torch.float32)
    assert_as_good_as_the_reference(
        lambda **x: gated_squares(**x, gate_first=True, backend="triton"),
        lambda **x: gated_squares_reference(**x, gate_first=True),
        dict(reversed(inputs.items())),
    )


def test_the_triton_kernel_takes_a_strided_weight():
    x, weight = torch.randn(1, 64), torch.randn(64, 2)[:, 0]
    found, expected = (gated_squares(x, weight=w, backend="triton") for w in (weight, weight.contiguous()))
    assert torch.equal(found.product, expected.product)


def test_fp64_is_refused_by_the_kernel():
    with pytest.raises(KernelError, match=r"gated_squares: the triton kernel does not take dtype torch\.float64"):
        gated_squares(torch.ones(2, 3, dtype=torch.float64), backend="triton")
