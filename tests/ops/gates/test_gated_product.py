"""Gated product, and the gradient of gate and value as one tensor, against the definition."""

import pytest
import torch
from torch.nn import functional

from megalin.errors import KernelError
from megalin.ops.gates.gated_product import gated_product, gated_product_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

every_activation = pytest.mark.parametrize("activation", ["none", "silu"])


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 34), (2, 2, 2600)])
def test_the_kernel_is_as_good_as_the_reference(activation, dtype, shape):
    assert_as_good_as_the_reference(
        lambda gate_value: [gated_product(gate_value, activation=activation, backend="triton")],
        lambda gate_value: [gated_product_reference(gate_value, activation=activation)],
        {"gate_value": torch.randn(shape).to(dtype)},
    )


@every_activation
def test_strided_gate_and_value(activation):
    def run(function, gate_value, **options):
        return [function(gate_value.mT, activation=activation, **options)]

    assert_as_good_as_the_reference(
        lambda gate_value: run(gated_product, gate_value, backend="triton"),
        lambda gate_value: run(gated_product_reference, gate_value),
        {"gate_value": torch.randn(2, 34, 5)},
    )


def test_the_first_half_is_the_gate():
    gate, value = torch.randn(2, 3, 5, dtype=torch.float64)
    for activation, active in (("none", gate), ("silu", functional.silu(gate))):
        assert torch.equal(gated_product(torch.cat([gate, value], dim=-1), activation=activation), active * value)


@every_activation
def test_equal_calls_give_the_same_bits(activation):
    gate_value = {"gate_value": torch.randn(7, 300)}
    first, second = (
        outputs_and_gradients(
            lambda gate_value: [gated_product(gate_value, activation=activation, backend="triton")], gate_value
        )
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_activation
def test_it_compiles_into_one_graph(activation):
    def block(x, weight):
        return [gated_product(x @ weight, activation=activation, backend="triton").sin()]

    inputs = {"x": torch.randn(2, 7, 6), "weight": torch.randn(6, 20)}
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected, found = outputs_and_gradients(block, inputs), outputs_and_gradients(compiled, inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_unsupported_dtypes_are_refused():
    with pytest.raises(KernelError, match=r"does not take dtype torch\.float64"):
        gated_product(torch.randn(3, 4, dtype=torch.float64), activation="silu", backend="triton")
