"""Launches of the forget-gate scan's kernels in CUDA C++ (csrc/cuda/forget_gate_scan.cu), for chunks with mild decays.

The Triton kernels (csrc/triton/scans/vector_decay.py) compute the other chunks and pass states between chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.dispatch.backend import Backend
from megalin.ops.dispatch.cuda_launch import call
from megalin.ops.scans.fixed_decay_cuda import aligned, operand, unmeasured

WIDTHS = (64, 128)
"""Keys and values a head."""


def limit(op: str, backend: Backend, q: Tensor, v: Tensor) -> str:
    """Reason why a call does not take the CUDA kernels; empty if it may."""
    if v.dtype != torch.bfloat16:
        return f"q, logit, v of {v.dtype}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return f"heads of {q.shape[-1]} keys and {v.shape[-1]} values; it has 64 and 128"
    return unmeasured(op, backend, v)


def scores(
    q: Tensor, logit: Tensor, bound: Tensor, documents: Tensor | None, results: tuple[Tensor, ...], scale: float
) -> None:
    """Writes `results`, the Chunks of csrc/triton/scans/vector_decay.py, of mild chunks, and the kind of all.

    Args:
        q, logit: [B, T, H, K] bf16.
        bound: [H, K] fp32.
        documents: [B, T] int32, contiguous.
    """
    q, logit = aligned(q), aligned(logit)
    q_start, k_end, pairs, through, kind = results
    tensors = (operand(q), operand(logit), bound, documents, q_start, k_end, pairs, through, kind)
    call("gate_scores", q.device, (*tensors, *q.shape, scale))


def gradients(
    d_output: Tensor,
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    states: Tensor,
    d_states: Tensor,
    kind: Tensor,
    results: tuple[Tensor, ...],
    scale: float,
) -> None:
    """Writes `results`: the gradients of q and of logits [B, T, H, K] and of bounds by chunk [B, H, N, K] fp32, of mild
    chunks.

    Args:
        d_output, v: [B, T, H, V] bf16.
        q, logit: [B, T, H, K] bf16.
        bound: [H, K] fp32.
        states: entering the chunks, [B, H, N, K, V] bf16.
        d_states: gradients of the states leaving the chunks, the same.
        kind: [B, H, N] int32.
    """
    operands = [aligned(x) for x in (q, logit, v, d_output)]
    tensors = (*map(operand, operands), bound, states, d_states, kind, *results)
    call("gate_gradients", q.device, (*tensors, *q.shape, v.shape[3], scale))
