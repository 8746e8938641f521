"""Tensors of more than 2^31 elements, whose offsets overflow 32 bits."""

import pytest
import torch

from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.norms.srmsnorm import srmsnorm
from megalin.ops.scans.fixed_decay import decay_scan

ROWS, WIDTH = 2**20 + 8, 2048


def large(*shape: int) -> torch.Tensor:
    assert torch.Size(shape).numel() > 2**31, shape
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_srmsnorm_of_more_than_2_31_elements(backend):
    x = large(ROWS, WIDTH).requires_grad_()
    y = srmsnorm(x, eps=1e-6, backend=backend)
    y.backward(y.detach())
    last = x.detach()[-16:].clone().requires_grad_()
    expected = srmsnorm(last, eps=1e-6, backend=backend)
    expected.backward(expected.detach())
    assert torch.equal(y[-16:], expected)
    assert torch.equal(x.grad[-16:], last.grad)


def test_rms_norm_of_more_than_2_31_elements():
    x, weight = large(ROWS, WIDTH), torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16)
    y = rms_norm(x, weight, eps=1e-6, backend="triton")
    assert torch.equal(y[-16:], rms_norm(x[-16:].clone(), weight, eps=1e-6, backend="triton"))


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_decay_scan_of_more_than_2_31_elements_ends_as_the_scan_of_its_last_tokens(backend):
    length, tail = ROWS + 56, 2048
    q, k, v = (large(1, length, 16, 128) for _ in range(3))
    slopes = torch.exp2(-torch.arange(1, 17, device="cuda") * 0.5)
    whole = decay_scan(q, k, v, slopes, backend=backend)
    before = decay_scan(*(x[:, :-tail] for x in (q, k, v)), slopes, backend=backend).state
    last = decay_scan(*(x[:, -tail:] for x in (q, k, v)), slopes, initial_state=before, backend=backend)
    for found, expected in ((whole.output[:, -tail:], last.output), (whole.state, last.state)):
        assert (found - expected).float().norm() <= 1e-2 * expected.float().norm()
