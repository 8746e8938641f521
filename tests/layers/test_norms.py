"""The norm of the residual stream."""

import torch

from megalin.layers.norms import SRMSNorm
from megalin.ops.srmsnorm import srmsnorm


def test_norm_holds_no_parameters_and_uses_its_eps():
    norm, x = SRMSNorm(0.5), torch.randn(2, 3, 8)
    assert not list(norm.parameters())
    assert torch.equal(norm(x), srmsnorm(x, eps=0.5))
    assert not torch.equal(norm(x), SRMSNorm(1e-6)(x))
