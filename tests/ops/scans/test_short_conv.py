"""Short convolution against its token-by-token form and against torch: values and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import KernelError, OperandError
from megalin.ops.scans.short_conv import MAX_TAPS, short_conv, short_conv_recurrent, short_conv_reference
from tests.numerics import Tensors, assert_close, errors, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

BATCH, WIDTH, TAPS = 2, 5, 4
BOUND = 1e-13
LENGTHS = (1, 2, 3, 4, 63, 65)


def make_inputs(length: int, dtype: torch.dtype = torch.float64, *, taps: int = TAPS, width: int = WIDTH) -> Tensors:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    state = draw(BATCH, taps - 1, width).to(torch.promote_types(dtype, torch.float32))
    return {"x": draw(BATCH, length, width), "weight": draw(width, taps), "bias": draw(width), "state": state}


def make_documents(length: int) -> Tensor:
    """Document ids: sample 0 has a document of one token, one of two and long ones; sample 1 has other starts."""
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
    """Cuts lie inside documents shorter than the window, and right after a document's end."""
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


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_packed_documents_do_not_leak(backend):
    """Results are equal bit by bit in fp32, however large the other document's values are."""
    inputs, results = make_inputs(24, torch.float32), []
    documents = (torch.arange(24) >= 11).int().expand(BATCH, -1)
    for other in (1.0, 1e30):
        x = torch.where(documents[..., None] == 0, other, inputs["x"]).requires_grad_()
        y = short_conv(x, inputs["weight"], inputs["bias"], document_ids=documents, backend=backend)
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


@pytest.mark.parametrize(
    ("length", "packed", "dtype"),
    [
        (1, False, torch.float32),
        (2, True, torch.bfloat16),
        (3, False, torch.float16),
        (63, True, torch.float16),
        (64, False, torch.bfloat16),
        (65, True, torch.float32),
        (128, False, torch.bfloat16),
        (129, False, torch.float32),
    ],
)
def test_the_kernel_is_as_good_as_the_reference(length: int, packed: bool, dtype: torch.dtype):
    documents = make_documents(length) if packed else None
    assert_as_good_as_the_reference(
        lambda **x: short_conv(**x, document_ids=documents, backend="triton"),
        lambda **x: short_conv_reference(**x, document_ids=documents),
        make_inputs(length, dtype),
    )


@pytest.mark.parametrize(
    ("taps", "activation"), [(2, "silu"), (3, "none"), (4, "none"), (5, "silu"), (MAX_TAPS, "silu")]
)
def test_the_kernel_of_every_width(taps: int, activation):
    """Documents shorter than the window, before and in the second tile."""
    starts = torch.zeros(BATCH, 134, dtype=torch.int32)
    starts[0, [1, 3, 64, 128, 130]], starts[1, [126, 129]] = 1, 1
    options = {"document_ids": starts.cumsum(1), "activation": activation}
    assert_as_good_as_the_reference(
        lambda **x: short_conv(**x, **options, backend="triton"),
        lambda **x: short_conv_reference(**x, **options),
        make_inputs(134, torch.float32, taps=taps),
    )


def test_the_kernel_without_bias_and_state():
    inputs = make_inputs(9, torch.float32)
    assert_as_good_as_the_reference(
        lambda **x: [short_conv(**x, bias=None, backend="triton").output],
        lambda **x: [short_conv_reference(**x, bias=None).output],
        {name: inputs[name] for name in ("x", "weight")},
    )


def test_the_kernel_takes_a_slice_and_any_gradient():
    """Half of a projection, more channels than one program handles, and a gradient with other strides."""
    width = 600
    inputs = make_inputs(5, torch.float32, width=width)
    inputs["x"] = torch.randn(BATCH, 5, 2 * width)

    def run(function, x, **rest):
        result = function(x.unflatten(-1, (2, width)).unbind(-2)[1], **rest)
        return result.output.mT.contiguous().mT, result.state

    assert_as_good_as_the_reference(
        lambda **x: run(lambda *a, **k: short_conv(*a, **k, backend="triton"), **x),
        lambda **x: run(short_conv_reference, **x),
        inputs,
    )


def test_the_kernel_takes_tokens_that_lie_far_apart(monkeypatch):
    monkeypatch.setattr("megalin.ops.scans.short_conv.MAX_STEP", WIDTH)
    inputs = {"x": torch.randn(BATCH, 3, 2 * WIDTH), "weight": torch.randn(WIDTH, TAPS)}

    def run(function, x: Tensor, weight: Tensor) -> list[Tensor]:
        return [function(x[..., WIDTH:], weight, None).output]

    assert_as_good_as_the_reference(
        lambda **x: run(partial(short_conv, backend="triton"), **x), lambda **x: run(short_conv_reference, **x), inputs
    )


def test_the_kernel_where_only_the_state_is_used():
    inputs = make_inputs(6, torch.float32)
    assert_as_good_as_the_reference(
        lambda x: [short_conv(x, inputs["weight"], None, backend="triton").state],
        lambda x: [short_conv_reference(x, inputs["weight"].to(x.dtype), None).state],
        {"x": inputs["x"]},
    )


def test_equal_calls_of_the_kernel_give_the_same_bits():
    def run(**x):
        return short_conv(**x, document_ids=make_documents(70), backend="triton")

    inputs = make_inputs(70, torch.bfloat16)
    assert_close(outputs_and_gradients(run, inputs), outputs_and_gradients(run, inputs), 0.0)


@pytest.mark.parametrize(
    ("taps", "dtype", "message"),
    [
        (4, torch.float64, r"does not take dtype torch\.float64"),
        (1, torch.float32, "does not take 1 taps, outside 2 to 8"),
        (9, torch.float32, "does not take 9 taps"),
    ],
)
def test_unsupported_arguments_are_refused(taps: int, dtype: torch.dtype, message: str):
    inputs = make_inputs(3, dtype, taps=taps)
    with pytest.raises(KernelError, match=message):
        short_conv(**inputs, backend="triton")


def test_operands_that_do_not_fit_are_refused():
    inputs = make_inputs(3, torch.float32)
    with pytest.raises(OperandError, match="weight has shape"):
        short_conv(**inputs | {"weight": inputs["weight"][1:]})
    with pytest.raises(OperandError, match="document_ids has shape"):
        short_conv(**inputs, document_ids=torch.zeros(BATCH, 4, dtype=torch.int32))
    with pytest.raises(OperandError, match=r"with 4 taps, give it \[B, 3, D\]"):
        short_conv(**inputs | {"state": inputs["state"][:, 1:]})
