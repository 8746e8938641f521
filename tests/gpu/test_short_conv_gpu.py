"""Short convolution on a GPU against fp64: lengths, documents, states, slices, equal bits."""

import pytest
import torch

from megalin.ops.scans.short_conv import short_conv, short_conv_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def make_inputs(batch, length, width, taps, dtype):
    """Inputs of the short convolution; x is the second half of the channels of `projection`."""
    return {
        "projection": torch.randn(batch, length, 2 * width, device="cuda").to(dtype),
        "weight": torch.randn(width, taps, device="cuda").to(dtype),
        "bias": torch.randn(width, device="cuda").to(dtype),
        "state": torch.randn(batch, taps - 1, width, device="cuda"),
    }


def make_documents(batch, length):
    """Ids of documents that start at one token in 16, and at the first token of a tile."""
    starts = torch.rand(batch, length, device="cuda") < 1 / 16
    starts[:, 64::128] = True
    starts[:, 129::128] = True
    return starts.cumsum(1, dtype=torch.int32)


def run(function, projection, **rest):
    return function(projection.unflatten(-1, (2, -1)).unbind(-2)[1], **rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("batch", "length", "width"),
    [(3, 1, 4096), (2, 36, 32), (2, 63, 528), (2, 64, 4096), (3, 65, 96), (2, 1000, 1003), (1, 4096, 256)],
)
def test_values_and_gradients_are_as_good_as_the_reference(batch, length, width, packed, dtype):
    compare(batch, length, width, 4, packed, dtype)


@pytest.mark.parametrize("taps", [2, 3, 5, 8])
def test_every_number_of_taps(taps):
    compare(2, 200, 96, taps, True, torch.bfloat16)


def compare(batch, length, width, taps, packed, dtype):
    options = {"document_ids": make_documents(batch, length) if packed else None}
    inputs = make_inputs(batch, length, width, taps, dtype)

    def kernel(**x):
        return run(short_conv, **x, **options, backend="triton")

    assert_as_good_as_the_reference(kernel, lambda **x: run(short_conv_reference, **x, **options), inputs)
    first, second = outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_packed_documents_do_not_leak():
    """Results are equal bit by bit, however large the other document's values are."""
    inputs, results = make_inputs(2, 200, 128, 4, torch.float32), []
    documents = (torch.arange(200, device="cuda") >= 63).int().expand(2, -1)
    for other in (1.0, 1e30):
        x = torch.where(documents[..., None] == 0, other, inputs["projection"][..., :128]).requires_grad_()
        y = short_conv(x, inputs["weight"], inputs["bias"], document_ids=documents, backend="triton")
        (gradient,) = torch.autograd.grad(y.output[:, 63:].square().sum() + y.state.sum(), x)
        results.append((y.output[:, 63:], y.state, gradient[:, 63:]))
        assert gradient[:, :63].eq(0).all()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inside_a_compiled_graph():
    """One graph with activation recomputation, and another length without recompilation."""
    weight = torch.randn(128, 4, device="cuda", requires_grad=True)

    @torch.compile(fullgraph=True, dynamic=True)
    def block(x):
        return torch.utils.checkpoint.checkpoint(
            lambda x: short_conv(2.0 * x, weight, None, backend="triton").output.square(), x, use_reentrant=False
        )

    for length in (200, 77):
        x = torch.randn(2, length, 128, device="cuda", requires_grad=True)
        found = torch.autograd.grad(block(x).sum(), (x, weight))
        whole = short_conv_reference(2.0 * x, weight, None).output.square().sum()
        for actual, expected in zip(found, torch.autograd.grad(whole, (x, weight)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
