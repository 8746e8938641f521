"""RMSNorm with a weight against torch's own, and the Triton kernel against the reference."""

import pytest
import torch
from torch.nn import functional

from megalin.ops.norms.rms_norm import rms_norm, rms_norm_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def test_values_and_gradients_equal_torchs():
    inputs = {"x": torch.randn(3, 5, 12, dtype=torch.float64), "weight": torch.randn(12, dtype=torch.float64)}
    actual = outputs_and_gradients(lambda x, weight: [rms_norm(x, weight, eps=0.1)], inputs)
    expected = outputs_and_gradients(lambda x, weight: [functional.rms_norm(x, (12,), weight, 0.1)], inputs)
    assert_close(actual, expected, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 200), (600, 33)])
def test_the_triton_kernel_is_as_good_as_the_reference(dtype, weight_dtype, rows, width):
    assert_as_good_as_the_reference(
        lambda x, weight: [rms_norm(x, weight, eps=1e-6, backend="triton")],
        lambda x, weight: [rms_norm_reference(x, weight, eps=1e-6)],
        {"x": torch.randn(rows, width).to(dtype), "weight": torch.randn(width).to(weight_dtype)},
    )
