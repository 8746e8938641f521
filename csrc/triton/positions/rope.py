"""RoPE: rotates the pairs (x_j, x_j+K/2) of each head by p theta_j, or by the inverse.

Bytes: x is read and written once. All heads have the same angles, so a token's sines are evaluated once.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.positions.silu_lrpe import _sine_and_cosine

PAIRS = 512
"""Pairs (over tokens, of one head) that a program holds at a time."""
WARPS = 4


@triton.jit(do_not_specialize=["rows", "period"])
def rotate_kernel(
    x_ptr, theta_ptr, positions_ptr, y_ptr, rows, period, stride, heads,
    KEY: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, HALF)
    inside = pair < KEY // 2
    mask = (row < rows)[:, None] & inside[None, :]
    position = tl.load(positions_ptr + row % period, mask=row < rows, other=0).to(tl.float32)
    theta = tl.load(theta_ptr + pair, mask=inside, other=0.0)
    sine, cosine = _sine_and_cosine(position[:, None], theta[None, :])
    if INVERSE:
        sine = -sine
    source = x_ptr + row[:, None] * stride + pair[None, :]
    target = y_ptr + row[:, None] * (heads * KEY) + pair[None, :]
    for head in range(0, heads):
        first = tl.load(source + head * KEY, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + head * KEY + KEY // 2, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + head * KEY, first * cosine - second * sine, mask=mask)
        tl.store(target + head * KEY + KEY // 2, first * sine + second * cosine, mask=mask)


def rotate(x: Tensor, theta: Tensor, positions: Tensor, *, inverse: bool) -> Tensor:
    """x [rows, H, K] with contiguous rows, theta [K/2] fp32, positions [period], repeated over the rows -> like x."""
    rows, heads, key = x.shape
    y = x.new_empty(rows, heads, key)
    half = triton.next_power_of_2(key // 2)
    block = max(1, PAIRS // half)
    rotate_kernel[(triton.cdiv(rows, block),)](
        x, theta, positions, y, rows, len(positions), x.stride(0), heads, key, inverse, block, half, num_warps=WARPS
    )
    return y
