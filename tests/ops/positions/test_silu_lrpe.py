"""SiLU and LRPE of queries and keys, and the gradient of their projection, against the definition."""

import pytest
import torch
from torch.nn import functional

from megalin.errors import KernelError
from megalin.ops.positions.silu_lrpe import silu_lrpe, silu_lrpe_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

every_form = pytest.mark.parametrize("form", ["cosine", "rotation", None])


def make_inputs(form, shape=(2, 7, 3, 3, 12), dtype=torch.float32):
    inputs = {"projection": torch.randn(shape).to(dtype)}
    if form is not None:
        inputs["theta"] = torch.rand(shape[3], shape[4] if form == "cosine" else shape[4] // 2)
    return inputs


def run(projection, positions, form, theta=None, backend="triton"):
    if backend == "reference":
        return silu_lrpe_reference(projection, theta, positions, form=form)
    return silu_lrpe(projection, theta, positions, form=form, backend=backend)


def assert_right(inputs, positions, form):
    assert_as_good_as_the_reference(
        lambda **x: run(**x, positions=positions, form=form),
        lambda **x: run(**x, positions=positions, form=form, backend="reference"),
        inputs,
    )


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(1, 1, 2, 1, 2), (2, 7, 3, 3, 12), (1, 66, 4, 2, 96)])
def test_the_kernels_are_as_good_as_the_reference(form, dtype, shape):
    assert_right(make_inputs(form, shape, dtype), torch.arange(shape[1]), form)


@every_form
def test_positions_of_each_sample_and_far_ones(form):
    assert_right(make_inputs(form), torch.stack([torch.arange(7) * 30011, torch.arange(7) % 3]), form)


@every_form
def test_a_strided_projection(form):
    inputs = make_inputs(form) | {"projection": torch.randn(3, 2, 12, 7, 3)}

    def strided(projection, **options):
        return run(projection.permute(1, 3, 4, 0, 2), positions=torch.arange(7), form=form, **options)

    assert_as_good_as_the_reference(strided, lambda **x: strided(**x, backend="reference"), inputs)


@every_form
def test_an_unused_slice_has_a_gradient_of_zero(form):
    inputs = make_inputs(form, (2, 7, 4, 3, 12))
    found = outputs_and_gradients(lambda **x: run(**x, positions=torch.arange(7), form=form)[:3], inputs)
    assert found["gradient.projection"][:, :, 3].eq(0).all()
    assert found["gradient.projection"][:, :, :3].ne(0).any()


@pytest.mark.parametrize("form", ["cosine", "rotation"])
def test_the_reference_is_silu_then_the_positions(form):
    """|code|^2 = silu(x)^2 at any angle."""
    inputs = {name: x.double() for name, x in make_inputs(form).items()}
    q, k, v = run(**inputs, positions=torch.arange(7), form=form, backend="auto")
    for part, code in enumerate((q, k)):
        x = inputs["projection"][:, :, part]
        active = x * torch.sigmoid(x)
        torch.testing.assert_close(code.square().sum(-1), active.square().sum(-1), rtol=1e-12, atol=1e-13)
    assert torch.equal(v, inputs["projection"][:, :, 2])


@every_form
def test_equal_calls_give_the_same_bits(form):
    inputs = make_inputs(form, (1, 70, 3, 2, 16))
    first, second = (
        outputs_and_gradients(lambda **x: run(**x, positions=torch.arange(70), form=form), inputs) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_form
def test_it_compiles_into_one_graph_with_views_of_the_other_slices(form):
    inputs = make_inputs(form)
    weight = torch.randn(12, 12)

    def block(projection, theta=None):
        q, k, v = run(projection @ weight, theta=theta, positions=torch.arange(7), form=form)
        return [q * 2.0, k + 1.0, v.sin()]

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected, found = outputs_and_gradients(block, inputs), outputs_and_gradients(compiled, inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_unsupported_dtypes_are_refused():
    inputs = {name: x.double() for name, x in make_inputs("cosine").items()}
    with pytest.raises(KernelError, match=r"does not take dtype torch\.float64"):
        run(**inputs, positions=torch.arange(7), form="cosine")
    inputs["projection"] = inputs["projection"].float()
    with pytest.raises(KernelError, match=r"does not take theta of torch\.float64"):
        run(**inputs, positions=torch.arange(7), form="cosine")


def test_silu_alone_needs_no_frequencies():
    projection = torch.randn(2, 7, 3, 3, 12)
    q, k, v = run(projection, torch.arange(7), None, backend="auto")
    assert torch.equal(q, functional.silu(projection[:, :, 0]))
    assert torch.equal(k, functional.silu(projection[:, :, 1]))
    assert torch.equal(v, projection[:, :, 2])
