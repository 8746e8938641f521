"""Decoding step of the vector-decay scan, S' = diag(e^g) S + k v^T, o = scale S'^T q; S is read and written once."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

TILE = 4096
"""Elements of the state per program."""


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, state_ptr, output_ptr, next_ptr,  # [B, H, K or V] strided; states [B, H, K, V]
    q_b, q_h, q_k, k_b, k_h, k_k, v_b, v_h, v_v, g_b, g_h, g_k, heads, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BLOCK_V)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    channel = tl.arange(0, BLOCK_K)
    value = (tl.program_id(0) % tiles) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (channel < K)[:, None] & (value < V)[None, :]
    q = tl.load(q_ptr + batch * q_b + head * q_h + channel * q_k, mask=channel < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + batch * k_b + head * k_h + channel * k_k, mask=channel < K, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + batch * g_b + head * g_h + channel * g_k, mask=channel < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + batch * v_b + head * v_h + value * v_v, mask=value < V, other=0.0).to(tl.float32)
    at = batch_head * K * V + channel[:, None] * V + value[None, :]
    state = tl.load(state_ptr + at, mask=inside, other=0.0) * tl.exp(g)[:, None] + k[:, None] * v[None, :]
    tl.store(next_ptr + at, state, mask=inside)
    output = tl.sum(q[:, None] * state, axis=0) * scale
    tl.store(output_ptr + batch_head * V + value, output.to(output_ptr.dtype.element_ty), mask=value < V)


def _constants(width: int, values: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    tile = max(1, min(triton.next_power_of_2(values), TILE // block))
    return {"K": width, "V": values, "BLOCK_K": block, "BLOCK_V": tile, "num_warps": 4}


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    scale: float,
    following: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, V] and next state, from q, k, log_decay [B, H, K], v [B, H, V], contiguous state [B, H, K, V].

    The next state is written to `following`, which may be `state`: a program reads its tile of it before it writes it.
    """
    batch, heads, width = q.shape
    constants = _constants(width, v.shape[2])
    output = v.new_empty(v.shape)
    following = torch.empty_like(state) if following is None else following
    step_kernel[(batch * heads * triton.cdiv(v.shape[2], constants["BLOCK_V"]),)](
        q, k, v, log_decay, state, output, following,
        *q.stride(), *k.stride(), *v.stride(), *log_decay.stride(), heads, scale, **constants,
    )  # fmt: skip
    return output, following
