"""SiLU and LRPE of queries and keys in one kernel against their definition."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.silu_lrpe import silu_lrpe, silu_lrpe_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

every_form = pytest.mark.parametrize("form", ["cosine", "rotation"])


def make_inputs(form, shape=(2, 7, 3, 12), dtype=torch.float32):
    width = shape[-1] if form == "cosine" else shape[-1] // 2
    q, k = (torch.randn(shape).to(dtype) for _ in range(2))
    return {"q": q, "k": k, "theta": torch.rand(shape[2], width)}


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 7, 3, 12), (1, 66, 2, 96)])
def test_the_kernel_is_as_good_as_the_reference(form, dtype, shape):
    positions = torch.arange(shape[1])
    assert_as_good_as_the_reference(
        lambda **x: silu_lrpe(**x, positions=positions, form=form, backend="triton"),
        lambda **x: silu_lrpe_reference(**x, positions=positions, form=form),
        make_inputs(form, shape, dtype),
    )


@every_form
def test_positions_of_each_row_and_far_ones(form):
    positions = torch.stack([torch.arange(7) * 30011, torch.arange(7) % 3])
    assert_as_good_as_the_reference(
        lambda **x: silu_lrpe(**x, positions=positions, form=form, backend="triton"),
        lambda **x: silu_lrpe_reference(**x, positions=positions, form=form),
        make_inputs(form),
    )


@every_form
def test_strided_parts_of_a_projection(form):
    inputs = make_inputs(form)
    qk = torch.randn(2, 7, 3, 36)
    case = {"whole": qk, "other": torch.randn(3, 2, 12, 7), "theta": inputs["theta"]}
    positions = torch.arange(7)

    def run(whole, other, theta, **options):
        parts = whole.flatten(2).unflatten(-1, (3, 36)).unbind(-2)  # [2, 7, 36] with rows of 108
        function = silu_lrpe if options else silu_lrpe_reference
        q, strange = parts[1].unflatten(-1, (3, 12)), other.permute(1, 3, 0, 2)
        return function(q, strange, theta, positions, form=form, **options)

    assert_as_good_as_the_reference(lambda **x: run(**x, backend="triton"), run, case)


@every_form
def test_the_reference_is_silu_then_the_positions(form):
    """Values and gradients of sums of angles: |code|^2 = silu(x)^2 whatever the angle."""
    inputs = {name: x.double() for name, x in make_inputs(form).items()}
    codes = silu_lrpe(**inputs, positions=torch.arange(7), form=form)
    for name, code in zip(("q", "k"), codes, strict=True):
        active = inputs[name] * torch.sigmoid(inputs[name])
        torch.testing.assert_close(code.square().sum(-1), active.square().sum(-1), rtol=1e-12, atol=1e-13)


@every_form
def test_equal_calls_give_the_same_bits(form):
    def run(**x):
        return silu_lrpe(**x, positions=torch.arange(70), form=form, backend="triton")

    inputs = make_inputs(form, (1, 70, 2, 16))
    first, second = outputs_and_gradients(run, inputs), outputs_and_gradients(run, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_close(first, second, 0.0)


def test_unsupported_dtypes_are_refused():
    inputs = {name: x.double() for name, x in make_inputs("cosine").items()}
    with pytest.raises(KernelError, match=r"does not take dtypes torch\.float64"):
        silu_lrpe(**inputs, positions=torch.arange(7), form="cosine", backend="triton")
