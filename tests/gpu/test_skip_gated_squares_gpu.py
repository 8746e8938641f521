"""Feed-through, gate and sums of squares in one kernel on a GPU against fp64: widths, slices, equal bits."""

import pytest
import torch

from megalin.ops.norms.skip_gated_squares import skip_gated_squares, skip_gated_squares_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (65, 1003), (1000, 4096), (4096, 96)])
def test_values_and_gradients_are_as_good_as_the_reference(rows, width, dtype):
    """The gate is the second half of the channels of a projection."""
    inputs = {name: torch.randn(1, rows, width, device="cuda").to(dtype) for name in ("x", "skip")}
    inputs["projection"] = torch.randn(1, rows, 2 * width, device="cuda").to(dtype)
    inputs |= {"factor": torch.randn(width, device="cuda"), "weight": torch.randn(width, device="cuda").to(dtype)}

    def run(function, projection, **rest):
        return function(**rest, gate=projection.unflatten(-1, (2, -1)).unbind(-2)[1])

    def kernel(**x):
        return run(lambda **y: skip_gated_squares(**y, backend="triton"), **x)

    assert_as_good_as_the_reference(kernel, lambda **x: run(skip_gated_squares_reference, **x), inputs)
    first, second = outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
