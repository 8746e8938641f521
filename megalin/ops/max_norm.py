"""MaxNormActivation and the uncentred LayerNorm of DANet: divisions by the largest and by the mean magnitude."""

from __future__ import annotations

from torch import Tensor

from megalin.ops.srmsnorm import compute_dtype


def max_norm(x: Tensor, *, eps: float) -> Tensor:
    """y = x / (max_j |x_j| + eps) over the last dimension (DenseAttention, MaxNormActivation).

    Args:
        x: [..., D], any float dtype; computed in at least fp32.
        eps: added to the maximum, so that a row of zeros gives zeros.

    Returns:
        [..., D] in the dtype of `x`. The maximum's gradient goes to a single index, as torch.max(dim) has it:
        with M = max |x| + eps, dx = dy / M, and dx_j -= sign(x_j) (sum dy . x) / M^2 at that index j.
    """
    wide = x.to(compute_dtype(x))
    return (wide / (wide.abs().max(-1, keepdim=True).values + eps)).to(x.dtype)


def mean_magnitude_norm(x: Tensor, *, eps: float) -> Tensor:
    """y = x / (mean_j |x_j| + eps) over the last dimension; arguments and result as `max_norm`."""
    wide = x.to(compute_dtype(x))
    return (wide / (wide.abs().mean(-1, keepdim=True) + eps)).to(x.dtype)
