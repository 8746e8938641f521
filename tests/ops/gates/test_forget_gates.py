"""Tied gates of HGRN2 in one kernel against their definition, at both ends of the sigmoid."""

import pytest
import torch

from megalin.errors import KernelError, OperandError
from megalin.ops.gates.forget_gates import forget_gates, forget_gates_reference
from tests.numerics import assert_close, outputs_and_gradients, relative_error
from tests.ops.kernels import assert_as_good_as_the_reference


def make_inputs(shape, dtype=torch.float32, *, spread=4.0):
    bound = torch.rand(shape[-1])
    bound[: shape[-1] // 3] = 0.0
    return {"logit": (spread * torch.randn(shape)).to(dtype), "bound": bound}


def kernel(**x):
    return forget_gates(**x, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "spread"), [((1, 1, 1), 1.0), ((2, 9, 30), 4.0), ((3, 300), 30.0)])
def test_the_kernel_is_as_good_as_the_reference(shape, spread, dtype):
    assert_as_good_as_the_reference(kernel, forget_gates_reference, make_inputs(shape, dtype, spread=spread))


def test_a_slice_of_a_projection():
    inputs = make_inputs((2, 5, 30))
    inputs["logit"] = torch.randn(2, 5, 90)

    def run(function, logit, bound):
        return function(logit.unflatten(-1, (3, 30)).unbind(-2)[1], bound)

    assert_as_good_as_the_reference(
        lambda **x: run(lambda *y: forget_gates(*y, backend="triton"), **x),
        lambda **x: run(forget_gates_reference, **x),
        inputs,
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gates_add_up_and_stay_finite_at_both_ends(backend):
    logit = torch.tensor([[-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 200.0, 1e4]]).mT.repeat(1, 2).requires_grad_()
    bound = torch.tensor([0.0, 0.75], requires_grad=True)
    gates = forget_gates(logit, bound, backend=backend)
    torch.testing.assert_close(gates.key + gates.log_decay.exp(), torch.ones_like(logit), rtol=0.0, atol=2e-7)
    gradients = torch.autograd.grad(gates.key.sum() + gates.log_decay.sum(), (logit, bound))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_strong_decay_without_a_bound_is_its_logit():
    logit = torch.tensor([[-1e4], [-200.0], [-90.0], [-20.0]])
    torch.testing.assert_close(kernel(logit=logit, bound=torch.zeros(1)).log_decay, logit, rtol=1e-6, atol=0.0)


def test_a_weak_decay_keeps_its_digits():
    """Near f = 1, log f has the relative error of 1 - f; a sum of logarithms would have rounded at 1."""
    logit, bound = torch.full((4, 8), 18.0), torch.full((8,), 0.5)
    exact = forget_gates_reference(logit.double(), bound.double())
    assert relative_error(kernel(logit=logit, bound=bound).log_decay, exact.log_decay) < 1e-6


def test_equal_calls_give_the_same_bits():
    inputs = make_inputs((70, 40), torch.bfloat16)
    assert_close(outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs), 0.0)


def test_unsupported_dtypes_are_refused():
    inputs = {name: x.double() for name, x in make_inputs((2, 3)).items()}
    with pytest.raises(KernelError, match=r"does not take dtypes torch\.float64"):
        kernel(**inputs)


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(OperandError, match="forget_gates: bound has shape"):
        forget_gates(torch.zeros(2, 4), torch.zeros(3))
