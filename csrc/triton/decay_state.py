"""The state that tokens leave behind under a fixed decay: the parts of a scan that form states, by themselves.

S = sum_t exp(-s (T - 1 - t)) k_t v_t^T
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
from megalin._triton.decay_scan import PROGRAMS, block_state_kernel, fold_kernel, numbers, state_tiles
from megalin._triton.tiles import aligned, tiled


def state(k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None) -> Tensor:
    """k [B, T, H, K], v [B, T, H, V], slopes [H] fp32, documents [B, T] -> [B, H, K, V] fp32."""
    k, v = aligned(k), aligned(v)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    rows, tiles = batch * heads, state_tiles(key, value, v.dtype)
    columns = triton.cdiv(value, tiles.value)
    # What the kernels take as the first of two blocks: the state that enters the second, which is empty.
    parts = min(32, max(1, triton.cdiv(PROGRAMS, rows * columns)))
    part_tokens = triton.cdiv(triton.cdiv(length, parts), tiles.chunk) * tiles.chunk
    added = k.new_empty(batch, heads, 2 * parts, key, value, dtype=torch.float32)
    states = k.new_empty(batch, heads, 2, key, value, dtype=torch.float32)
    switches = {"DECAY": slopes is not None, "DOCUMENTS": documents is not None, "REVERSE": False}
    width = max(16, triton.next_power_of_2(key))
    block_state_kernel[rows * columns, parts](
        tiled(k, tiles.chunk, width), tiled(v, tiles.chunk, tiles.value), slopes, documents, added, length, heads,
        2 * parts, part_tokens, 0, KEY=key, VALUE=value, **switches, C=tiles.chunk, BLOCK_KEY=width,
        BLOCK_VALUE=tiles.value, **numbers(v.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    fold_kernel[rows * triton.cdiv(key * value, 1024),](
        added, states, None, slopes, documents, length, heads, 2, 2, part_tokens, SIZE=key * value, **switches,
        BOUNDARY=False, PARTS=parts, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return states[:, :, 1].contiguous()
