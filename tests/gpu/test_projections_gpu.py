"""Ops between projections and mixers on a GPU against fp64: gated product, SiLU and LRPE, RoPE."""

import pytest
import torch

from megalin.ops.gates.gated_product import gated_product, gated_product_reference
from megalin.ops.positions.encodings import rope, rope_reference
from megalin.ops.positions.silu_lrpe import silu_lrpe, silu_lrpe_reference
from tests.numerics import errors, outputs_and_gradients

FLOOR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
LENGTHS = [1, 63, 64, 65, 1000, 4096]
every_dtype = pytest.mark.parametrize("dtype", list(FLOOR))
every_length = pytest.mark.parametrize("length", LENGTHS)


def assert_right(kernel, reference, inputs, dtype):
    truth = outputs_and_gradients(reference, {name: x.double() for name, x in inputs.items()})
    same = errors(outputs_and_gradients(reference, inputs), truth)
    results = [outputs_and_gradients(kernel, inputs) for _ in range(2)]
    found = errors(results[0], truth)
    assert all(found[name] <= max(2 * same[name], FLOOR[dtype]) for name in truth), (found, same)
    assert all(torch.equal(results[0][name], results[1][name]) for name in truth)


@every_dtype
@every_length
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("width", [40, 1536])
def test_gated_product(dtype, length, activation, width):
    assert_right(
        lambda gate_value: [gated_product(gate_value, activation=activation, backend="triton")],
        lambda gate_value: [gated_product_reference(gate_value, activation=activation)],
        {"gate_value": torch.randn(2, length, 2 * width, device="cuda").to(dtype)},
        dtype,
    )


@every_dtype
@every_length
@pytest.mark.parametrize(("form", "parts", "key"), [(None, 4, 128), ("cosine", 3, 96), ("rotation", 4, 128)])
@pytest.mark.parametrize("start", [0, 131072])
def test_silu_lrpe(dtype, length, form, parts, key, start):
    inputs = {"projection": torch.randn(2, length, parts, 3, key, device="cuda").to(dtype)}
    if form is not None:
        inputs["theta"] = 10000.0 ** -torch.rand(3, key if form == "cosine" else key // 2, device="cuda")
    positions = torch.arange(start, start + length, device="cuda")
    positions = torch.stack([positions, positions % 17])
    assert_right(
        lambda projection, theta=None: silu_lrpe(projection, theta, positions, form=form, backend="triton"),
        lambda projection, theta=None: silu_lrpe_reference(projection, theta, positions, form=form),
        inputs,
        dtype,
    )


@every_dtype
@every_length
@pytest.mark.parametrize("start", [0, 131072])
def test_rope(dtype, length, start):
    """Keys are a slice of a projection."""
    projection = torch.randn(2, length, 2 * 3 * 96, device="cuda").to(dtype)
    positions = torch.arange(start, start + length, device="cuda")

    def run(function, projection, **options):
        k, _ = projection.unflatten(-1, (2, 3, 96)).unbind(-3)
        return [function(k, positions, **options)]

    assert_right(
        lambda projection: run(rope, projection, backend="triton"),
        lambda projection: run(rope_reference, projection),
        {"projection": projection},
        dtype,
    )
