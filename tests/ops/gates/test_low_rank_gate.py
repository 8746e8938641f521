"""Low-rank gate in one kernel against its definition."""

import pytest
import torch
from torch.nn import functional

from megalin.errors import KernelError, OperandError
from megalin.ops.gates.low_rank_gate import low_rank_gate, low_rank_gate_reference
from tests.numerics import assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


def make_inputs(batch, length, width, rank, dtype=torch.float32):
    shapes = {"x": (batch, length, width), "code": (batch, length, rank), "weight": (width, rank), "bias": (width,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def kernel(**x):
    return [low_rank_gate(**x, backend="triton")]


def reference(**x):
    return [low_rank_gate_reference(**x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 35, 130, 5), (1, 7, 30, 32)])
def test_the_kernel_is_as_good_as_the_reference(shape, dtype):
    assert_as_good_as_the_reference(kernel, reference, make_inputs(*shape, dtype=dtype))


def test_slices_of_wider_rows():
    inputs = make_inputs(2, 5, 60, 12)

    def run(function, x, code, weight, bias):
        return function(x=x[..., 30:], code=code[..., :6], weight=weight[:30, :6], bias=bias[:30])

    assert_as_good_as_the_reference(lambda **x: run(kernel, **x), lambda **x: run(reference, **x), inputs)


def test_the_reference_is_a_linear_map_then_a_gate():
    inputs = {name: x.double() for name, x in make_inputs(2, 5, 30, 6).items()}

    def in_two_steps(x, code, weight, bias):
        return [torch.sigmoid(functional.linear(code, weight, bias)) * x]

    assert_close(outputs_and_gradients(reference, inputs), outputs_and_gradients(in_two_steps, inputs), 1e-14)


def test_equal_calls_give_the_same_bits():
    inputs = make_inputs(1, 70, 40, 8, torch.bfloat16)
    assert_close(outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs), 0.0)


@pytest.mark.parametrize(
    ("rank", "dtype", "message"),
    [(3, torch.float64, r"does not take dtypes torch\.float64"), (129, torch.float32, "a rank of 129, above 128")],
)
def test_unsupported_arguments_are_refused(rank, dtype, message):
    with pytest.raises(KernelError, match=message):
        kernel(**make_inputs(1, 2, 3, rank, dtype))


def test_operands_that_do_not_fit_are_refused():
    inputs = make_inputs(1, 2, 3, 4)
    with pytest.raises(OperandError, match="low_rank_gate: weight has shape"):
        low_rank_gate(**inputs | {"weight": inputs["weight"][1:]})
