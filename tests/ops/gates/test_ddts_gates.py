"""Gates of Rodimus against their plain formulas in fp64: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.gates.ddts_gates import TAIL, DDTSGates, ddts_gates
from tests.numerics import Tensors, assert_close, outputs_and_gradients, relative_error


def plain(strength: Tensor, temperature: Tensor, k: Tensor) -> DDTSGates:
    """The gates as the paper writes them, accurate in fp64 down to a = -700."""
    gate = torch.log1p(torch.exp(strength))
    power = 1.0 / (1.0 + torch.exp(-temperature))
    return DDTSGates(-gate * power, gate**power * k / k.square().sum(-1, keepdim=True).sqrt())


def make_inputs(*, low: float, high: float, dtype: torch.dtype = torch.float64) -> Tensors:
    """Strengths in [low, high], temperatures over the whole range, keys of any length."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 40, 8)
    strength = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
    temperature = 4.0 * torch.randn(shape, generator=generator, dtype=torch.float64)
    k = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(-3.0, 5.0)
    return {name: x.to(dtype) for name, x in (("strength", strength), ("temperature", temperature), ("k", k))}


def both(inputs: Tensors) -> tuple[Tensors, Tensors]:
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    return outputs_and_gradients(ddts_gates, inputs), outputs_and_gradients(plain, exact)


@pytest.mark.parametrize(("low", "high"), [(-5.0, 5.0), (-14.9, -10.0), (5.0, 60.0)])
def test_equals_the_plain_formula(low: float, high: float):
    assert_close(*both(make_inputs(low=low, high=high)), 1e-9 if high == -10.0 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("low", [-20.0, -60.0, -200.0])
def test_the_tail_equals_the_plain_formula(low: float, dtype: torch.dtype):
    """fp32 rounds a logarithm of 200 to 1e-5, an error that its exponential keeps, and has no decay of 1e-86."""
    actual, expected = both(make_inputs(low=low, high=low + 5.0, dtype=dtype))
    assert all(tensor.isfinite().all() for tensor in actual.values())
    if dtype == torch.float32 and low == -200.0:
        assert actual.pop("output.0").eq(0).all()
        del expected["output.0"]
    assert_close(actual, expected, 1e-12 if dtype == torch.float64 else 3e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_branches_are_continuous(dtype: torch.dtype):
    below, above = (
        torch.full((1, 1), TAIL + step, dtype=torch.float64).to(dtype).requires_grad_() for step in (-1e-4, 1e-4)
    )
    one = torch.ones(1, 1, dtype=dtype)
    keys = [ddts_gates(a, 100.0 * one, one).key for a in (below, above)]
    slopes = [torch.autograd.grad(key.log(), a)[0] for key, a in zip(keys, (below, above), strict=True)]
    assert relative_error(keys[1] / keys[0], torch.exp(torch.tensor([[2e-4]]))) < 1e-5
    assert slopes[0].item() == pytest.approx(slopes[1].item(), rel=1e-6)


def test_gates_stay_wide_and_need_no_finite_softplus():
    gates = ddts_gates(*(x.bfloat16() for x in make_inputs(low=-200.0, high=-190.0).values()))
    assert {tensor.dtype for tensor in gates} == {torch.float32}
    assert gates.log_decay.abs().max() == 0.0  # softplus underflows, and so does the decay
    assert gates.key.isfinite().all()


def test_a_key_of_zero_stays_zero():
    zero = torch.zeros(1, 4)
    assert ddts_gates(zero, zero, zero).key.eq(0).all()


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(OperandError, match="ddts_gates: k has shape"):
        ddts_gates(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 5))
