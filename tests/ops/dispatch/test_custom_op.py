"""Ops without a derivative: their gradients, and second derivatives of kernels, are errors and not missing terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.errors import KernelError
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.scans.fixed_decay import decay_scan


@custom_op("test_scaled", lambda x, *_: x.new_empty(x.shape))
def scaled(x: Tensor, others: list[Tensor], name: str) -> Tensor:
    return 2.0 * x + sum(others)


def test_an_op_without_a_formula_refuses_tensors_that_require_gradients():
    x = torch.ones(3)
    assert torch.equal(scaled(x, [x], "any"), torch.full((3,), 3.0))
    wanted = torch.ones(3, requires_grad=True)
    for arguments in ((wanted, [x]), (x, [x, wanted])):
        with pytest.raises(KernelError, match=r'megalin::test_scaled has no derivative; use backend "reference"'):
            scaled(*arguments, "any")
        with torch.no_grad():
            scaled(*arguments, "any")


KERNELS = {
    "autograd.Function": lambda x, backend: decay_scan(x, x, x, None, backend=backend).output,
    "formula": lambda x, backend: rms_norm(x, torch.ones(8), eps=1e-6, backend=backend),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.parametrize("kind", KERNELS)
def test_second_derivatives_are_the_references_only(kind: str):
    x = torch.randn(1, 20, 1, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(KERNELS[kind](x, "reference").square().sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), x)[0].any()
    output = KERNELS[kind](x, "triton").square().sum()
    with pytest.raises(KernelError, match="has no derivative"):
        torch.autograd.grad(output, x, create_graph=True)
