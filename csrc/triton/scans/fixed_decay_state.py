"""Final state of the fixed-decay scan from zero, without outputs, and its gradient.

S = sum_t w_t k_t v_t^T,    w_t = exp(-s (T - 1 - t));    dk_t = w_t dS v_t,    dv_t = w_t dS^T k_t
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.chips import MEASURED_ON, SHARED_BYTES, shared_bytes
from megalin._triton.dispatch.tiles import aligned, tiled
from megalin._triton.scans.fixed_decay import PROGRAMS, numbers, state_tiles
from megalin._triton.scans.fixed_decay_sweep import block_state_kernel, fold_kernel


def gradient_tile(key: int, value: int) -> dict[str, int]:
    """Tile of gradient_kernel: 128 value columns, or 64 if two tiles of 256 keys exceed an SM's shared memory. Before
    Hopper half the tokens, which spilled and exceeded the 99 KB of compute capability 8.9."""
    if key > 128 and shared_bytes() < SHARED_BYTES[MEASURED_ON]:
        width = max(16, min(64, triton.next_power_of_2(value)))
        return {"C": 32, "BLOCK_VALUE": width, "num_warps": 8, "num_stages": 2}
    if key > 128 and value > 128:
        return {"C": 64, "BLOCK_VALUE": 64, "num_warps": 8, "num_stages": 2}
    return {"C": 64, "BLOCK_VALUE": max(16, min(128, triton.next_power_of_2(value))), "num_warps": 4, "num_stages": 2}


@triton.jit(do_not_specialize=["length"])
def gradient_kernel(
    dstate_ptr, k_tiles, v_tiles, dk_tiles, dv_tiles, slopes_ptr, documents_ptr, length, heads,
    KEY: tl.constexpr, VALUE: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr,
    C: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """dk and dv of C tokens of a head from dS [B H, KEY, VALUE]."""
    row, start = tl.program_id(0), tl.program_id(1) * C
    batch, head = row // heads, row % heads
    token = tl.minimum(start + tl.arange(0, C), length - 1)
    weight = tl.full([C], 1.0, tl.float32)
    if DECAY:
        slope = tl.load(slopes_ptr + head).to(tl.float32) * 1.4426950408889634
        weight = tl.exp2(-slope * (length - 1 - token).to(tl.float32))
    if DOCUMENTS:
        documents_ptr += batch.to(tl.int64) * length
        weight = tl.where(tl.load(documents_ptr + token) == tl.load(documents_ptr + length - 1), weight, 0.0)
    key, value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    dstate_ptr += row.to(tl.int64) * KEY * VALUE
    k = k_tiles.load([batch, head, start, 0]).reshape([C, BLOCK_KEY])
    dk = tl.zeros([C, BLOCK_KEY], tl.float32)
    for column in range(0, VALUE, BLOCK_VALUE):
        inside = (key < KEY)[:, None] & (column + value < VALUE)[None, :]
        dstate = tl.load(dstate_ptr + key[:, None] * VALUE + (column + value)[None, :], mask=inside, other=0.0)
        dstate = dstate.to(k.dtype)
        v = v_tiles.load([batch, head, start, column]).reshape([C, BLOCK_VALUE])
        dk = tl.dot(v, tl.trans(dstate), dk)
        dv = tl.dot(k, dstate) * weight[:, None]
        dv_tiles.store([batch, head, start, column], dv.to(k.dtype).reshape([1, 1, C, BLOCK_VALUE]))
    dk = (dk * weight[:, None]).to(k.dtype)
    dk_tiles.store([batch, head, start, 0], dk.reshape([1, 1, C, BLOCK_KEY]))


def state(k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None) -> Tensor:
    """k [B, T, H, K], v [B, T, H, V], slopes [H] fp32, documents [B, T] -> [B, H, K, V] fp32."""
    k, v = aligned(k), aligned(v)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    rows, tiles = batch * heads, state_tiles(key, value, v.dtype)
    columns = triton.cdiv(value, tiles.value)
    parts = min(32, triton.cdiv(PROGRAMS, rows * columns), triton.cdiv(length, tiles.chunk))
    part_tokens = triton.cdiv(triton.cdiv(length, parts), tiles.chunk) * tiles.chunk
    added = k.new_empty(batch, heads, parts, key, value, dtype=torch.float32)
    switches = {"DECAY": slopes is not None, "DOCUMENTS": documents is not None, "REVERSE": False}
    width = max(16, triton.next_power_of_2(key))
    block_state_kernel[rows * columns, parts](
        tiled(k, tiles.chunk, width), tiled(v, tiles.chunk, tiles.value), slopes, documents, added, length, heads,
        parts, part_tokens, 0, KEY=key, VALUE=value, **switches, C=tiles.chunk, BLOCK_KEY=width,
        BLOCK_VALUE=tiles.value, **numbers(v.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if parts == 1:
        return added[:, :, 0]
    total = torch.empty_like(added[:, :, 0])
    fold_kernel[rows * triton.cdiv(key * value, 1024),](
        added, total, None, slopes, documents, length, heads, 1, 1, part_tokens, SIZE=key * value, **switches,
        BOUNDARY=False, WHOLE=True, PARTS=parts, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return total


def gradient(
    d_state: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dk and dv from d_state [B, H, K, V] fp32, contiguous; the rest as in `state`, k and v of bf16."""
    k, v = aligned(k), aligned(v)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    (batch, length, heads, key), value = k.shape, v.shape[3]
    width, tile = max(16, triton.next_power_of_2(key)), gradient_tile(key, value)
    column = tile["BLOCK_VALUE"]
    gradient_kernel[batch * heads, triton.cdiv(length, tile["C"])](
        d_state, tiled(k, tile["C"], width), tiled(v, tile["C"], column), tiled(dk, tile["C"], width),
        tiled(dv, tile["C"], column), slopes, documents, length, heads, KEY=key, VALUE=value,
        DECAY=slopes is not None, DOCUMENTS=documents is not None, BLOCK_KEY=width, **tile,
    )  # fmt: skip
    return dk, dv
