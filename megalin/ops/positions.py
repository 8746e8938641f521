"""LRPE, the linearised relative position encoding, in its cosine and its rotation form."""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.srmsnorm import compute_dtype


def lrpe_cosine(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """y_t = [x_t cos(p_t theta) | x_t sin(p_t theta)], so that y_s . y_t = sum_i x_si x_ti cos(theta_i (s - t)).

    Args:
        x: [B, T, H, K] queries or keys.
        theta: [H, K] angular frequencies in radians a token, fp32.
        positions: [T] or [B, T] token positions, integers (a shift of all positions changes nothing).

    Returns:
        [B, T, H, 2K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.

    Source: TransNormerLLM section 3.1 (LRPE), released code; cosFormer2.
    """
    angle = _angles(x, theta, positions)
    wide = x.to(angle.dtype)
    return torch.cat([wide * angle.cos(), wide * angle.sin()], dim=-1).to(x.dtype)


def lrpe_rotation(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """Rotates the pairs (x_2j, x_2j+1) of each head by the angle p theta_j.

    Args:
        x: [B, T, H, K] queries or keys, K even; neighbouring elements form a pair.
        theta: [H, K/2] angular frequencies in radians a token, fp32.
        positions: [T] or [B, T] token positions, integers.

    Returns:
        [B, T, H, K] in the dtype of `x`. Angles, sines and products are computed in at least fp32.
    """
    angle = _angles(x, theta, positions)
    even, odd = x.to(angle.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def _angles(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """p_t theta_hi as [1 or B, T, H, K'], in the compute dtype: bf16 could not even count the positions."""
    dtype = compute_dtype(x)
    return positions.to(dtype)[..., None, None] * theta.to(dtype)
