"""Decoding step of the recurrence with a fixed scalar decay or none: states are read once and written once."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, slopes_ptr, state_ptr, o_ptr, next_ptr, heads,
    KEY: tl.constexpr, VALUE: tl.constexpr, DECAY: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """next = e^{-s} state + k v^T, o = next^T q: one pass over the states [rows, KEY, VALUE]."""
    program, tiles = tl.program_id(0), tl.cdiv(VALUE, BLOCK_VALUE)
    row, column = (program // tiles).to(tl.int64), program % tiles * BLOCK_VALUE
    key, value = tl.arange(0, BLOCK_KEY), column + tl.arange(0, BLOCK_VALUE)
    inside = (key < KEY)[:, None] & (value < VALUE)[None, :]
    offset = row * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    state = tl.load(state_ptr + offset, mask=inside, other=0.0)
    q = tl.load(q_ptr + row * KEY + key, mask=key < KEY, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * KEY + key, mask=key < KEY, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * VALUE + value, mask=value < VALUE, other=0.0).to(tl.float32)
    if DECAY:
        state *= tl.exp(-tl.load(slopes_ptr + row % heads))
    state += k[:, None] * v[None, :]
    tl.store(next_ptr + offset, state, mask=inside)
    tl.store(o_ptr + row * VALUE + value, tl.sum(q[:, None] * state, axis=0), mask=value < VALUE)


def step(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, state: Tensor, following: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q, k [B, H, K], v [B, H, V], state [B, H, K, V] fp32, all contiguous -> o [B, H, V] and the next state, written
    to `following`, which may be `state`: a program reads its tile of it before it writes it."""
    (batch, heads, key), value = k.shape, v.shape[2]
    o = torch.empty_like(v)
    following = torch.empty_like(state) if following is None else following
    width = min(32, triton.next_power_of_2(value))
    step_kernel[batch * heads * triton.cdiv(value, width),](
        q, k, v, slopes, state, o, following, heads, KEY=key, VALUE=value, DECAY=slopes is not None,
        BLOCK_KEY=triton.next_power_of_2(key), BLOCK_VALUE=width, num_warps=4,
    )  # fmt: skip
    return o, following
