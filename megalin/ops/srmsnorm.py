"""SRMSNorm: the weightless root-mean-square norm of TransNormerLLM."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which norms, positions and states of `x` are computed: fp32, or fp64 where `x` is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def srmsnorm(x: Tensor, *, eps: float) -> Tensor:
    """y = x * (mean(x^2) + eps)^(-1/2) over the last dimension (TransNormerLLM eq. 8).

    Args:
        x: [..., D], any float dtype; the mean and the root are computed in at least fp32.
        eps: inside the root, so that a row of zeros gives zeros and a gradient of at most eps^(-1/2).

    Returns:
        [..., D] in the dtype of `x`.
    """
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
