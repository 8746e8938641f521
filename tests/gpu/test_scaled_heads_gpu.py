"""Heads times their factors on a GPU against fp64: widths, dtypes, equal bits."""

import pytest
import torch

from megalin.ops.gates.scaled_heads import scaled_heads, scaled_heads_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 65, 3, 20), (1, 4096, 64, 64), (3, 333, 2, 3000)])
def test_values_and_gradients_are_as_good_as_the_reference(shape, dtype):
    inputs = {"x": torch.randn(shape, device="cuda").to(dtype), "factor": torch.randn(shape[:-1], device="cuda")}

    def kernel(**x):
        return [scaled_heads(**x, backend="triton")]

    assert_as_good_as_the_reference(kernel, lambda **x: [scaled_heads_reference(**x)], inputs)
    first, second = outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
