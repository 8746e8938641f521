"""Low-rank gate on a GPU against fp64: ranks, slices of a projection, equal bits."""

import pytest
import torch

from megalin.ops.gates.low_rank_gate import low_rank_gate, low_rank_gate_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "rank"), [(1, 64, 16), (72, 32, 5), (65, 1003, 20), (1000, 4096, 32), (4096, 96, 128)]
)
def test_values_and_gradients_are_as_good_as_the_reference(rows, width, rank, dtype):
    inputs = {
        "projection": torch.randn(1, rows, 2 * width, device="cuda").to(dtype),
        "code": torch.randn(1, rows, rank, device="cuda").to(dtype),
        "weight": (rank**-0.5 * torch.randn(width, rank, device="cuda")).to(dtype),
        "bias": torch.randn(width, device="cuda").to(dtype),
    }

    def run(function, projection, **rest):
        return [function(projection.unflatten(-1, (2, -1)).unbind(-2)[0], **rest)]

    def kernel(**x):
        return run(lambda *a, **k: low_rank_gate(*a, **k, backend="triton"), **x)

    assert_as_good_as_the_reference(kernel, lambda **x: run(low_rank_gate_reference, **x), inputs)
    first, second = outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
