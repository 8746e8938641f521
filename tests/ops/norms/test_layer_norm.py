"""LayerNorm, alone and of a sum, against torch's own, and the Triton kernel against the reference."""

import functools

import pytest
import torch
from torch.nn import functional

from megalin._triton.norms import layer_norm as kernels
from megalin.errors import KernelError
from megalin.ops.norms.gated_layer_norm import gated_layer_norm
from megalin.ops.norms.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def draw(rows, width, dtype=torch.float64, weight_dtype=None, mean=0.0):
    vectors = {name: torch.randn(width).to(weight_dtype or dtype) for name in ("weight", "bias")}
    return {"x": torch.randn(rows, width).add(mean).to(dtype), "addend": torch.randn(rows, width).to(dtype), **vectors}


def without_addend(inputs):
    return {name: x for name, x in inputs.items() if name != "addend"}


def test_values_and_gradients_equal_torchs():
    def expected(x, addend, weight, bias):
        return [functional.layer_norm(x + addend, (12,), weight, bias, 0.1), x + addend]

    inputs = draw(15, 12, mean=2.0)
    actual = outputs_and_gradients(lambda **named: add_layer_norm(**named, eps=0.1), inputs)
    assert_close(actual, outputs_and_gradients(expected, inputs), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 200), (600, 33)])
def test_the_triton_kernel_of_a_sum_is_as_good_as_the_reference(dtype, weight_dtype, rows, width):
    assert_as_good_as_the_reference(
        lambda **inputs: add_layer_norm(**inputs, eps=1e-6, backend="triton"),
        lambda **inputs: add_layer_norm_reference(**inputs, eps=1e-6),
        draw(rows, width, dtype, weight_dtype, mean=1.0),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_triton_kernel_adds_the_gradients_of_an_x_that_passes_by(dtype):
    """Without an addend x is read by the norm and by the next addition, and its gradients meet in the backward."""
    assert_as_good_as_the_reference(
        lambda **inputs: add_layer_norm(addend=None, **inputs, eps=1e-6, backend="triton"),
        lambda **inputs: add_layer_norm_reference(addend=None, **inputs, eps=1e-6),
        without_addend(draw(37, 40, dtype)),
    )


def test_the_triton_kernel_alone_is_as_good_as_the_reference_far_from_zero():
    """A variance from the mean square would have no digit left: mean^2 is 1e8 times it."""
    assert_as_good_as_the_reference(
        lambda **inputs: [layer_norm(**inputs, eps=1e-6, backend="triton")],
        lambda **inputs: [layer_norm_reference(**inputs, eps=1e-6)],
        without_addend(draw(9, 200, torch.float32, mean=1e4)),
    )


def test_an_unused_output_has_no_gradient_and_costs_none():
    inputs = {name: x.requires_grad_() for name, x in draw(4, 16, torch.float32).items()}
    total = add_layer_norm(**inputs, eps=1e-6, backend="triton").total
    found = torch.autograd.grad(total.sum(), list(inputs.values()), allow_unused=True)
    assert all(torch.equal(x, torch.ones(4, 16)) for x in found[:2])
    assert found[2:] == (None, None)


def test_two_calls_give_the_same_bits():
    inputs = draw(70, 48, torch.bfloat16)
    first, second = (
        outputs_and_gradients(lambda **named: add_layer_norm(**named, eps=1e-6, backend="triton"), inputs)
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rows_without_a_kernel_raise_or_take_the_reference():
    wide = draw(1, 8200, torch.float32)
    with pytest.raises(KernelError, match="add_layer_norm: the triton kernel does not take a width of 8200, above"):
        add_layer_norm(**wide, eps=1e-6, backend="triton")
    mixed = draw(2, 8, torch.float32) | {"addend": torch.ones(2, 8, dtype=torch.bfloat16)}
    with pytest.raises(KernelError, match=r"does not take torch\.bfloat16 added to torch\.float32"):
        add_layer_norm(**mixed, eps=1e-6, backend="triton")
    vectors = {"weight": torch.ones(8), "bias": torch.ones(8).bfloat16()}
    with pytest.raises(KernelError, match=r"a weight of dtype torch\.float32 and a bias of dtype torch\.bfloat16"):
        layer_norm(mixed["x"], **vectors, eps=1e-6, backend="triton")
    for inputs in (wide, mixed):
        found, expected = (function(**inputs, eps=1e-6) for function in (add_layer_norm, add_layer_norm_reference))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("addend", [True, False])
def test_a_sum_without_a_gradient_leaves_that_of_the_norm(backend, addend):
    def normed(function, inputs):
        named = {"addend": None} | inputs
        found = function(**named, sum_gradient=False, backend=backend)
        assert not found.total.requires_grad
        return [found.normed]

    inputs = draw(37, 40, torch.float32)
    inputs = inputs if addend else without_addend(inputs)
    found = outputs_and_gradients(lambda **x: normed(functools.partial(add_layer_norm, eps=1e-6), x), inputs)
    named = lambda **x: [add_layer_norm_reference(**{"addend": None} | x, eps=1e-6).normed]  # noqa: E731
    assert_close(found, outputs_and_gradients(named, inputs), 1e-5)


def one_norm(x, addend, weight, bias):
    return [layer_norm(x + addend, weight, bias, eps=1e-6, backend="triton")]


def norm_of_a_sum(x, addend, weight, bias):
    return [add_layer_norm(x, addend, weight, bias, eps=1e-6, sum_gradient=False, backend="triton").normed]


def gated_norm(x, addend, weight, bias):
    return [gated_layer_norm(x, addend, weight, bias, eps=1e-6, backend="triton")]


@pytest.mark.parametrize("function", [one_norm, norm_of_a_sum, gated_norm])
def test_a_compiled_norm_reads_no_gradient_of_an_unused_sum(function, monkeypatch):
    """torch.compile passes zeros for the gradient of an unused output, as many bytes as the norm's own gradient."""
    read = []
    backward = kernels.backward

    def recorded(dy, dtotal, *others, **options):
        read.append(dtotal)
        return backward(dy, dtotal, *others, **options)

    monkeypatch.setattr(kernels, "backward", recorded)
    inputs = draw(6, 16, torch.float32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = outputs_and_gradients(compiled, inputs)
    assert_close(found, outputs_and_gradients(function, inputs), 1e-6)
    assert read == [None, None]


@pytest.mark.slow
def test_a_compiled_block_has_the_gradients_of_a_sum_that_is_x_itself():
    def block(x, addend, weight, bias, backend="triton"):
        first = add_layer_norm(x, None, weight, bias, eps=1e-6, backend=backend)
        second = add_layer_norm(first.total, first.normed * addend, weight, bias, eps=1e-6, backend=backend)
        return [second.total + second.normed]

    inputs = draw(6, 16, torch.float32)
    found = outputs_and_gradients(torch.compile(block, fullgraph=True, backend="aot_eager"), inputs)
    assert_close(found, outputs_and_gradients(lambda **x: block(**x, backend="reference"), inputs), 1e-5)
