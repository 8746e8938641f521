"""Launches of the vector-decay scan's kernels for the steep chunks of tied forget gates alone.

The CUDA kernels of the forget-gate scan (csrc/cuda/forget_gate_scan.cu) compute the other chunks.
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
from megalin._triton.scans.vector_decay_chunk import gradients_kernel, products, scores_kernel


def scores(
    q: Tensor, logit: Tensor, bound: Tensor, documents: Tensor | None, kind: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores [B, H, N C, C] and decays through chunks [B, H, N, K] fp32 of steep chunks; others are uninitialised."""
    (batch, length, heads, width), number = q.shape, kind.shape[2]
    pairs = q.new_empty(batch, heads, number * CHUNK, CHUNK)
    through = q.new_empty(batch, heads, number, width, dtype=torch.float32)
    unused = q.new_empty(batch, heads, number * CHUNK, width)  # for decayed q and k, which the CUDA kernels form again
    scores_kernel[(batch * heads * number,)](
        q, logit, bound, documents, _level_masks(q.device, q.dtype), kind, unused, unused, pairs, through,
        *_strides(q, logit, bound, True), length, number, heads, scale,
        DOCUMENTS=documents is not None, SOME=True, GATES=True, **_scores_constants(width, q.dtype),
    )  # fmt: skip
    return pairs, through


def gradients(
    d_output: Tensor, q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, documents: Tensor | None, kind: Tensor,
    through: Tensor, states: Tensor, d_states: Tensor, results: tuple[Tensor, Tensor, Tensor], scale: float,
) -> None:  # fmt: skip
    """Writes `results`, the gradients of q, of logits and of bounds by chunk, of steep chunks."""
    (batch, length, heads, width), number = q.shape, kind.shape[2]
    dq_start, dk_end = (v.new_empty(batch, heads, number * CHUNK, width) for _ in range(2))
    dscores, dself = v.new_empty(batch, heads, number * CHUNK, CHUNK), through.new_empty(batch, heads, number * CHUNK)
    from_products = (dq_start, dk_end, dscores, dself, torch.empty_like(through))
    constants = _products_constants(width, v.shape[3], v.dtype)
    steep_products_kernel[(batch * heads * number, triton.cdiv(width, constants["BLOCK_K"]))](
        v, d_output, states, d_states, kind, *from_products,
        *v.stride()[:3], *d_output.stride()[:3], length, number, heads, **constants,
    )  # fmt: skip
    constants = _gradients_constants(width, v.dtype)
    gradients_kernel[(batch * heads * number, triton.cdiv(width, constants["BLOCK_K"]))](
        q, logit, bound, documents, _level_masks(v.device, v.dtype), kind, through, *from_products, *results,
        *_strides(q, logit, bound, True), length, number, heads, scale,
        DOCUMENTS=documents is not None, SOME=True, GATES=True, **constants,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "num_chunks"])
def steep_products_kernel(
    v_ptr, do_ptr, states_ptr, dstates_ptr, kind_ptr,
    dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
    v_b, v_t, v_h, do_b, do_t, do_h,
    length, num_chunks, heads,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`products` of chunks of kind 0."""
    if tl.load(kind_ptr + tl.program_id(0)) == 0:
        products(
            v_ptr, do_ptr, states_ptr, dstates_ptr,
            dq_start_ptr, dk_end_ptr, dscores_ptr, dself_ptr, dthrough_ptr,
            v_b, v_t, v_h, do_b, do_t, do_h,
            length, num_chunks, heads, K, V, BLOCK_K, BLOCK_V,
        )  # fmt: skip
