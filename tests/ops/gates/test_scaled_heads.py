"""Heads times their factors in one kernel, against the definition."""

import pytest
import torch

from megalin.errors import KernelError, OperandError
from megalin.ops.gates.scaled_heads import scaled_heads, scaled_heads_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def make_inputs(*shape, dtype=torch.float32):
    return {"x": torch.randn(shape).to(dtype), "factor": torch.randn(shape[:-1])}


def kernel(**x):
    return [scaled_heads(**x, backend="triton")]


def reference(**x):
    return [scaled_heads_reference(**x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 35, 3, 20), (1, 7, 2, 300)])
def test_the_kernel_is_as_good_as_the_reference(shape, dtype):
    assert_as_good_as_the_reference(kernel, reference, make_inputs(*shape, dtype=dtype))


def test_slices_of_wider_tensors():
    inputs = make_inputs(2, 5, 4, 24)

    def run(function, x, factor):
        return function(x=x[..., 1:, 8:], factor=factor[..., :3])

    assert_as_good_as_the_reference(lambda **x: run(kernel, **x), lambda **x: run(reference, **x), inputs)


def test_equal_calls_give_the_same_bits():
    inputs = make_inputs(1, 70, 3, 40, dtype=torch.bfloat16)
    assert_close(outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs), 0.0)


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [
        (3, torch.float64, r"does not take dtypes torch\.float64, torch\.float32"),
        (4097, torch.float32, "a width of 4097, above 4096"),
    ],
)
def test_unsupported_arguments_are_refused(width, dtype, message):
    with pytest.raises(KernelError, match=message):
        kernel(**make_inputs(1, 2, 3, width, dtype=dtype))


def test_operands_that_do_not_fit_are_refused():
    inputs = make_inputs(1, 2, 3, 4)
    with pytest.raises(OperandError, match="scaled_heads: factor has shape"):
        scaled_heads(**inputs | {"factor": inputs["factor"][..., 1:]})
