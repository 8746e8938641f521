"""Relative position encodings of queries and keys of DenseAttention's ablations: cosine, g2 and rotary."""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.choices import RelPEForm, RelPEFrequencies
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.positions.encodings import lrpe_rotation


def relpe_frequencies(
    kind: RelPEFrequencies, head_dim: int, *, constant: float | None = None, device: torch.device | None = None
) -> Tensor:
    """Angular frequencies theta [K], radians a token, fp64.

    released: theta_i = 10000^(-i / K), the released code. printed: theta_i = 10000^(-2 i / K), DenseAttention eq. 6.
    constant: `constant` for all i.
    """
    if kind == "constant":
        assert constant is not None, kind
        return torch.full((head_dim,), constant, dtype=torch.float64, device=device)
    exponent = torch.arange(head_dim, dtype=torch.float64, device=device) * (-1.0 / head_dim)
    return 10000.0 ** (exponent if kind == "released" else 2.0 * exponent)


def relpe(x: Tensor, theta: Tensor, positions: Tensor, *, form: RelPEForm) -> Tensor:
    """Encodes the positions p of queries or keys, channel by channel or in pairs.

        cosine: y_i = x_i cos(p theta_i), g_1 of the paper
        g2:     y_i = x_i (cos(p theta_i) - sin(p theta_i))
        rope:   rotates the pairs (x_2j, x_2j+1) by p theta_2j

    Unlike a rotation, the first two depend on absolute positions: number the tokens of each document from 0.

    Args:
        x: [B, T, H, K]; with rope K is even.
        theta: [K], radians a token.
        positions: [T] or [B, T] integers.

    Returns:
        [B, T, H, K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: DenseAttention section 3.2 and appendix H.2.
    """
    places = "T int" if positions.dim() == 1 else "bT int"
    check_operands("relpe", {"x": (x, "BTHK"), "theta": (theta, "K"), "positions": (positions, places)})
    dtype = compute_dtype(x)
    if form == "rope":
        return lrpe_rotation(x, theta[::2].to(dtype).expand(x.shape[2], -1), positions)
    angle = positions.to(dtype)[..., None, None] * theta.to(dtype)
    factor = angle.cos() if form == "cosine" else angle.cos() - angle.sin()
    return (x.to(dtype) * factor).to(x.dtype)
