"""Tied gates of HGRN2 on a GPU against fp64: weak and strong decays, slices of a projection, equal bits."""

import pytest
import torch

from megalin.ops.gates.forget_gates import forget_gates, forget_gates_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "spread"), [(1, 64, 1.0), (65, 1003, 4.0), (1000, 2048, 30.0), (4096, 96, 1.0)]
)
def test_values_and_gradients_are_as_good_as_the_reference(rows, width, spread, dtype):
    bound = torch.rand(width, device="cuda")
    bound[: width // 3] = 0.0
    inputs = {"projection": (spread * torch.randn(1, rows, 3 * width, device="cuda")).to(dtype), "bound": bound}

    def run(function, projection, bound):
        return function(projection.unflatten(-1, (3, -1)).unbind(-2)[1], bound)

    def kernel(**x):
        return run(lambda *y: forget_gates(*y, backend="triton"), **x)

    assert_as_good_as_the_reference(kernel, lambda **x: run(forget_gates_reference, **x), inputs)
    first, second = outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
