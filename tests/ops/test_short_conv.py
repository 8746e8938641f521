"""The short convolution against its token-by-token form and torch's own, values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.short_conv import short_conv, short_conv_recurrent
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients

BATCH, WIDTH, TAPS = 2, 5, 4
BOUND = 1e-13
LENGTHS = (1, 2, 3, 4, 63, 65)


def make_inputs(length: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    state = draw(BATCH, TAPS - 1, WIDTH).to(torch.promote_types(dtype, torch.float32))
    return {"x": draw(BATCH, length, WIDTH), "weight": draw(WIDTH, TAPS), "bias": draw(WIDTH), "state": state}


def make_documents(length: int) -> Tensor:
    """Row 0: a document of one, one of two and long ones; row 1: cut at other places."""
    starts = torch.zeros(BATCH, length, dtype=torch.int32)
    for row, places in enumerate(((1, 3, 20), (2, 7, 8, 9))):
        starts[row, [place for place in places if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32)


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_equals_the_recurrent_form(length: int, packed: bool, activation):
    options = {"document_ids": make_documents(length) if packed else None, "activation": activation}
    actual = outputs_and_gradients(lambda **x: short_conv(**x, **options), make_inputs(length))
    expected = outputs_and_gradients(lambda **x: short_conv_recurrent(**x, **options), make_inputs(length))
    assert_close(actual, expected, BOUND)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_a_grouped_convolution(length: int):
    inputs = make_inputs(length)
    del inputs["state"]

    def oracle(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        padded = functional.pad(x.mT, (TAPS - 1, 0))
        return [functional.silu(functional.conv1d(padded, weight[:, None], bias, groups=WIDTH)).mT]

    actual = outputs_and_gradients(lambda **x: [short_conv(**x).output], inputs)
    assert_close(actual, outputs_and_gradients(oracle, inputs), BOUND)


def test_no_bias_is_a_bias_of_zero():
    inputs = make_inputs(9)
    zero = short_conv(inputs["x"], inputs["weight"], torch.zeros(WIDTH, dtype=torch.float64))
    assert torch.equal(short_conv(inputs["x"], inputs["weight"], None).output, zero.output)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 20, 21, 22])
def test_state_carries_a_sequence_over_a_cut(cut: int):
    """Cuts inside documents shorter than the window, and right after a document's end."""
    inputs, documents = make_inputs(24), make_documents(24)
    x, rest = inputs.pop("x"), inputs
    whole = short_conv(x, **rest, document_ids=documents)
    first = short_conv(x[:, :cut], **rest, document_ids=documents[:, :cut])
    other = (documents[:, cut] != documents[:, cut - 1])[:, None, None]
    carried = rest | {"state": first.state.masked_fill(other, 0.0)}
    second = short_conv(x[:, cut:], **carried, document_ids=documents[:, cut:])
    assert_close(
        {"output": torch.cat([first.output, second.output], dim=1), "state": second.state},
        {"output": whole.output, "state": whole.state},
        BOUND,
    )


def test_packed_documents_do_not_leak():
    """Bit by bit in fp32, however large the other document is."""
    inputs, results = make_inputs(24, torch.float32), []
    documents = (torch.arange(24) >= 11).int().expand(BATCH, -1)
    for other in (1.0, 1e30):
        x = torch.where(documents[..., None] == 0, other, inputs["x"]).requires_grad_()
        y = short_conv(x, inputs["weight"], inputs["bias"], document_ids=documents)
        (gradient,) = torch.autograd.grad(y.output[:, 11:].square().sum() + y.state.sum(), x)
        results.append((y.output[:, 11:], y.state, gradient[:, 11:]))
        assert gradient[:, :11].eq(0).all()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bf16_inputs_lose_only_their_own_rounding():
    inputs = make_inputs(65, torch.bfloat16)
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    expected = outputs_and_gradients(lambda **x: short_conv(**x), exact)
    actual = errors(outputs_and_gradients(lambda **x: short_conv(**x), inputs), expected)
    naive = errors(outputs_and_gradients(lambda **x: short_conv_recurrent(**x), inputs), expected)
    for name in expected:
        assert actual[name] <= 2 * naive[name] + 1e-6, name
