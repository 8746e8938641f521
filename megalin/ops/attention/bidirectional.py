"""Bidirectional softmax attention within documents, without keys at padding.

    o_t = sum over visible s of p_ts v_s,    p_t = softmax over visible s of q_t . k_s / sqrt(K)

Visible are the valid tokens of t's document, before and after t; where a document has none, all of its tokens, so that
every softmax has a key. Models call `bidirectional_attention`, torch's fused attention; it is tested against its
definition, `bidirectional_attention_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.attention.softmax import check_heads
from megalin.ops.positions.encodings import num_tokens_in_documents


def bidirectional_attention(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor | None = None) -> Tensor:
    """Softmax attention, as above, by torch's fused attention: without a mask FlashAttention-2 or cuDNN on GPUs, with
    one the memory-efficient kernel, and fused kernels of the CPU. None of them stores T x S scores.

    Args:
        q: [B, T, H, K].
        k, v: [B, S, H, K].
        visible: [1 or B, 1 or T, S] from `visible_in_documents`; None: all.

    Returns:
        [B, T, H, K] in the dtype of q; scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: incompatible tensors.
    """
    check_heads("bidirectional_attention", q, (k, "BSHK"), (v, "BSHK"), visible=(visible, "btS bool"))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T or S, K]
    mask = None if visible is None else visible[:, None]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def visible_in_documents(document_ids: Tensor | None, valid: Tensor | None, positions: Tensor) -> Tensor | None:
    """Keys of the tokens at `positions` [T] of full sequences: [1 or B, 1 or T, S], True where visible; None: all.

    Args:
        document_ids: [B, S], non-decreasing along S; None where each sequence is one document.
        valid: [B, S] bool, False at padding; None where all tokens count.
    """
    if document_ids is None:
        return None if valid is None else (valid | ~valid.any(1, keepdim=True))[:, None]
    same = document_ids[:, positions, None] == document_ids[:, None, :]  # [B, T, S]
    if valid is None:
        return same
    return same & (valid | (num_tokens_in_documents(document_ids, valid) == 0))[:, None]


def bidirectional_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """Definition of `bidirectional_attention` for S = T, one token and head at a time; q, k and v [B, T, H, K]."""
    batch, length, heads, width = q.shape
    rows = []
    for b in range(batch):
        for t in range(length):
            own = [s for s in range(length) if document_ids is None or document_ids[b, s] == document_ids[b, t]]
            keys = [s for s in own if valid is None or valid[b, s]] or own
            for h in range(heads):
                weights = torch.softmax(k[b, keys, h] @ q[b, t, h] / width**0.5, 0)
                rows.append(weights @ v[b, keys, h])
    return torch.stack(rows).view(batch, length, heads, width)
