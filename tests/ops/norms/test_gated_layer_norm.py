"""LayerNorm with a gate after it: torch's own, and the Triton kernel against the reference."""

import pytest
import torch
from torch.nn import functional

from megalin.errors import KernelError
from megalin.ops.norms.gated_layer_norm import gated_layer_norm, gated_layer_norm_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def draw(rows, width, dtype):
    sizes = {"x": (rows, width), "gate": (rows, width), "weight": (width,), "bias": (width,)}
    return {name: torch.randn(size).to(dtype) for name, size in sizes.items()}


@pytest.mark.parametrize("activation", ["none", "sigmoid"])
def test_values_and_gradients_equal_torchs(activation):
    def expected(x, gate, weight, bias):
        factor = gate.sigmoid() if activation == "sigmoid" else gate
        return [functional.layer_norm(x, (12,), weight, bias, 0.1) * factor]

    inputs = draw(15, 12, torch.float64)
    actual = outputs_and_gradients(lambda **x: [gated_layer_norm(**x, eps=0.1, gate_activation=activation)], inputs)
    assert_close(actual, outputs_and_gradients(expected, inputs), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["none", "sigmoid"])
@pytest.mark.parametrize(("rows", "width"), [(5, 200), (130, 33)])
def test_the_triton_kernel_is_as_good_as_the_reference(dtype, activation, rows, width):
    options = {"eps": 1e-6, "gate_activation": activation}
    assert_as_good_as_the_reference(
        lambda **x: [gated_layer_norm(**x, **options, backend="triton")],
        lambda **x: [gated_layer_norm_reference(**x, **options)],
        draw(rows, width, dtype),
    )


def test_a_gate_of_another_dtype_takes_the_reference():
    inputs = draw(2, 8, torch.float32)
    inputs["gate"] = inputs["gate"].bfloat16()
    with pytest.raises(KernelError, match=r"does not take a gate of dtype torch\.bfloat16 with torch\.float32"):
        gated_layer_norm(**inputs, eps=1e-6, backend="triton")
    assert torch.equal(gated_layer_norm(**inputs, eps=1e-6), gated_layer_norm_reference(**inputs, eps=1e-6))
