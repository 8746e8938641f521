"""Launches of the vector-decay scan's kernels for the steep chunks of tied forget gates alone.

The CUDA kernels of the forget-gate scan (csrc/cuda/forget_gate_scan.cu) compute the other chunks. A program takes each
chunk that is its own in turn, so that a launch costs little where no chunk is steep.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.scans.vector_decay import (
    CHUNK,
    _gradients_constants,
    _level_masks,
    _products_constants,
    _scores_constants,
    _strides,
)
from megalin._triton.scans.vector_decay_chunk import gradients_of_chunk, products_of_chunk, scores_of_chunk

PROGRAMS = 528
"""Programs of a launch, four per multiprocessor of an H100."""


def scores(
    q: Tensor, logit: Tensor, bound: Tensor, documents: Tensor | None, kind: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores [B, H, N C, C] and decays through chunks [B, H, N, K] fp32 of steep chunks; others are uninitialised."""
    (batch, length, heads, width), number = q.shape, kind.shape[2]
    pairs = q.new_empty(batch, heads, number * CHUNK, CHUNK)
    through = q.new_empty(batch, heads, number, width, dtype=torch.float32)
    total = batch * heads * number
    steep_scores_kernel[(min(total, PROGRAMS),)](
        q, logit, bound, documents, _level_masks(q.device, q.dtype), kind, pairs, through,
        *_strides(q, logit, bound, True), length, number, heads, total, scale,
        DOCUMENTS=documents is not None, **_scores_constants(width, q.dtype),
    )  # fmt: skip
    return pairs, through


def gradients(
    d_output: Tensor, q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, documents: Tensor | None, kind: Tensor,
    through: Tensor, states: Tensor, d_states: Tensor, results: tuple[Tensor, Tensor, Tensor], scale: float,
) -> None:  # fmt: skip
    """Writes `results`, the gradients of q, of logits and of bounds by chunk, of steep chunks."""
    (batch, length, heads, width), number = q.shape, kind.shape[2]
    total = batch * heads * number
    dq_start, dk_end = (v.new_empty(batch, heads, number * CHUNK, width) for _ in range(2))
    dscores, dself = v.new_empty(batch, heads, number * CHUNK, CHUNK), through.new_empty(batch, heads, number * CHUNK)
    from_products = (dq_start, dk_end, dscores, dself, torch.empty_like(through))
    constants = _products_constants(width, v.shape[3], v.dtype)
    steep_products_kernel[(min(total, PROGRAMS), triton.cdiv(width, constants["BLOCK_K"]))](
        v, d_output, states, d_states, kind, *from_products,
        *v.stride()[:3], *d_output.stride()[:3], length, number, heads, total, **constants,
    )  # fmt: skip
    constants = _gradients_constants(width, v.dtype)
    steep_gradients_kernel[(min(total, PROGRAMS), triton.cdiv(width, constants["BLOCK_K"]))](
        q, logit, bound, documents, _level_masks(v.device, v.dtype), kind, through, *from_products, *results,
        *_strides(q, logit, bound, True), length, number, heads, total, scale,
        DOCUMENTS=documents is not None, **constants,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "num_chunks", "total"])
def steep_scores_kernel(
    q_ptr, logit_ptr, bound_ptr, documents_ptr, masks_ptr, kind_ptr, scores_ptr, through_ptr,
    q_b, q_t, q_h, l_b, l_t, l_h, b_b, b_t, b_h,
    length, num_chunks, heads, total, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """scores_kernel of the steep chunks among `total`."""
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        if tl.load(kind_ptr + index) == 0:
            scores_of_chunk(
                index, q_ptr, logit_ptr, bound_ptr, documents_ptr, masks_ptr,
                scores_ptr, scores_ptr, scores_ptr, through_ptr,
                q_b, q_t, q_h, l_b, l_t, l_h, b_b, b_t, b_h,
                length, num_chunks, heads, scale, K, BLOCK_K, DOCUMENTS, True, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["length", "num_chunks", "total"])
def steep_products_kernel(
    v_ptr, do_ptr, states_ptr, dstates_ptr, kind_ptr,
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
    v_b, v_t, v_h, do_b, do_t, do_h,
    length, num_chunks, heads, total,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """products_kernel of the steep chunks among `total`."""
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        if tl.load(kind_ptr + index) == 0:
            products_of_chunk(
                index, v_ptr, do_ptr, states_ptr, dstates_ptr,
                dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
                v_b, v_t, v_h, do_b, do_t, do_h, length, num_chunks, heads, K, V, BLOCK_K, BLOCK_V,
            )  # fmt: skip


@triton.jit(do_not_specialize=["length", "num_chunks", "total"])
def steep_gradients_kernel(
    q_ptr, logit_ptr, bound_ptr, documents_ptr, masks_ptr, kind_ptr, through_ptr,
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
    dq_ptr, dlogit_ptr, dbound_ptr,
    q_b, q_t, q_h, l_b, l_t, l_h, b_b, b_t, b_h,
    length, num_chunks, heads, total, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """gradients_kernel of the steep chunks among `total`."""
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        if tl.load(kind_ptr + index) == 0:
            gradients_of_chunk(
                index, q_ptr, logit_ptr, bound_ptr, documents_ptr, masks_ptr, through_ptr,
                dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
                dq_ptr, dlogit_ptr, dbound_ptr,
                q_b, q_t, q_h, l_b, l_t, l_h, b_b, b_t, b_h,
                length, num_chunks, heads, scale, K, BLOCK_K, DOCUMENTS, True,
            )  # fmt: skip
