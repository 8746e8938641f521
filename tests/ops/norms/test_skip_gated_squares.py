"""Feed-through, gate and sums of squares of rows in one kernel against their definition."""

import pytest
import torch

from megalin.errors import KernelError, OperandError
from megalin.ops.norms.gated_squares import gated_squares
from megalin.ops.norms.skip_gated_squares import skip_gated_squares, skip_gated_squares_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def make_inputs(shape, dtype=torch.float32):
    rows = {name: torch.randn(shape).to(dtype) for name in ("x", "skip", "gate")}
    return rows | {"factor": torch.randn(shape[-1]), "weight": torch.randn(shape[-1]).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 30), (3, 1100)])
def test_the_kernel_is_as_good_as_the_reference(shape, dtype):
    assert_as_good_as_the_reference(
        lambda **x: skip_gated_squares(**x, backend="triton"), skip_gated_squares_reference, make_inputs(shape, dtype)
    )


def test_a_gate_that_is_half_of_a_projection():
    inputs = make_inputs((2, 5, 30))
    inputs["gate"] = torch.randn(2, 5, 60)

    def run(function, gate, **rest):
        return function(**rest, gate=gate.unflatten(-1, (2, 30)).unbind(-2)[1])

    assert_as_good_as_the_reference(
        lambda **x: run(lambda **y: skip_gated_squares(**y, backend="triton"), **x),
        lambda **x: run(skip_gated_squares_reference, **x),
        inputs,
    )


def test_the_reference_is_the_feed_through_then_gated_squares():
    inputs = {name: x.double() for name, x in make_inputs((2, 5, 30)).items()}

    def in_two_steps(x, skip, factor, gate, weight):
        return gated_squares(x + factor * skip, gate, weight, gate_first=True)

    actual = outputs_and_gradients(skip_gated_squares, inputs)
    assert_close(actual, outputs_and_gradients(in_two_steps, inputs), 1e-14)


def test_equal_calls_give_the_same_bits():
    def run(**x):
        return skip_gated_squares(**x, backend="triton")

    inputs = make_inputs((9, 70), torch.bfloat16)
    assert_close(outputs_and_gradients(run, inputs), outputs_and_gradients(run, inputs), 0.0)


def test_unsupported_dtypes_are_refused():
    inputs = {name: x.double() for name, x in make_inputs((2, 3)).items()}
    with pytest.raises(KernelError, match=r"does not take dtype torch\.float64"):
        skip_gated_squares(**inputs, backend="triton")


def test_operands_that_do_not_fit_are_refused():
    inputs = make_inputs((2, 3))
    with pytest.raises(OperandError, match="skip_gated_squares: gate has shape"):
        skip_gated_squares(**inputs | {"gate": inputs["gate"][1:]})
