"""Keyed dropout on a GPU: the masks of the CPU, bit for bit, eager and compiled."""

import pytest
import torch

from megalin.ops.dropout import DropoutKeys, dropout, sample_keys

DRAWS = 2**33 - 2 + torch.arange(4)
"""Numbers of samples whose low 32 bits overflow after the second."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_values_and_gradients_are_those_of_the_cpu(rate, dtype):
    x, weight = (torch.randn(4, 1000, 768).to(dtype) for _ in range(2))

    def results(device, function):
        keys = DropoutKeys(
            sample_keys(torch.tensor(7, device=device), DRAWS.to(device)), torch.arange(1000, device=device)
        )
        leaf = x.detach().to(device).requires_grad_()
        y = function(leaf, keys, torch.tensor(5, device=device), rate=rate)
        (gradient,) = torch.autograd.grad((y * weight.to(device)).sum(), leaf)
        return y.detach().cpu(), gradient.cpu()

    expected = results("cpu", dropout)
    compiled = torch.compile(dropout, fullgraph=True, dynamic=False)
    for found in (results("cuda", dropout), results("cuda", compiled)):
        for actual, wanted in zip(found, expected, strict=True):
            assert torch.equal(actual == 0, wanted == 0)
            torch.testing.assert_close(actual, wanted, rtol=torch.finfo(dtype).eps, atol=0)
