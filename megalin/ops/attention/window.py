"""Causal sliding-window softmax attention with one key shared by all heads and a cache of fixed size.

    o_th = sum over visible s of p_ths v_sh,    p_th = softmax over visible s of q_th . k_s / sqrt(K)

Token t attends to those of the `window` tokens t - window + 1 .. t that are in its document. Models call
`window_attention`: `causal_attention` with the key repeated, or with a cache torch's fused attention under a mask. It
is tested against `window_attention_reference`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.attention.causal import causal_attention
from megalin.ops.attention.softmax import check_window, softmax_attention, visible_tokens, within_window
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.documents import UNPACKED, PackedDocuments


class WindowCache(NamedTuple):
    """Keys and values of the last window - 1 tokens, oldest first; empty entries are zero."""

    k: Tensor
    """[B, W - 1, K]."""
    v: Tensor
    """[B, W - 1, H, K]."""
    remembered: Tensor
    """[B, W - 1], 1 where the entry holds a token of the last token's document, else 0."""


class WindowAttentionOutput(NamedTuple):
    """Result of windowed attention."""

    output: Tensor
    """[B, T, H, K] in the dtype of q."""
    cache: WindowCache | None
    """Cache after the last token, in the dtype of the input cache; None without one."""


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    documents: PackedDocuments = UNPACKED,
    cache: WindowCache | None = None,
) -> WindowAttentionOutput:
    """Sliding-window attention, as above.

    Args:
        q: [B, T, H, K], queries of the last T of S tokens; with a cache S = T.
        k: [B, S, K], shared by the heads.
        v: [B, S, H, K].
        window: W, visible tokens, including the token itself.
        documents: of the S tokens, by default one per sequence.
        cache: the tokens before the first, of its document.

    Returns:
        WindowAttentionOutput. Scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: incompatible tensors.

    Source: Rodimus+ section 3.2.
    """
    _check(q, k, v, window, documents.ids, cache)
    if cache is None:
        keys = k[:, :, None].expand_as(v)
        output = causal_attention(q, keys, v, documents=documents, window=window)
        return WindowAttentionOutput(output, None)
    visible = _visible(documents.ids, cache.remembered > 0, length=q.shape[1])  # [B, T, W - 1 + T]
    k, v = torch.cat([cache.k.to(k.dtype), k], dim=1), torch.cat([cache.v.to(v.dtype), v], dim=1)
    output = softmax_attention(q, k[:, :, None].expand_as(v), v, visible=within_window(visible, window))
    past = k.shape[1] - (window - 1)
    kept = visible[:, -1, past:]  # of the last token's document
    next_k = k[:, past:].masked_fill(~kept[..., None], 0.0).to(cache.k.dtype)
    next_v = v[:, past:].masked_fill(~kept[..., None, None], 0.0).to(cache.v.dtype)
    return WindowAttentionOutput(output, WindowCache(next_k, next_v, kept.to(cache.remembered.dtype)))


def _check(
    q: Tensor, k: Tensor, v: Tensor, window: int, document_ids: Tensor | None, cache: WindowCache | None
) -> None:
    op = "window_attention"
    operands: dict[str, tuple[Tensor | None, str]] = {
        "q": (q, "BTHK"),
        "k": (k, "BSK"),
        "v": (v, "BSHK"),
        "document_ids": (document_ids, "BS int"),
    }
    if cache is not None:
        operands |= {
            "cache.k": (cache.k, "BPK"),
            "cache.v": (cache.v, "BPHK"),
            "cache.remembered": (cache.remembered, "BP"),
        }
        operands |= {"k": (k, "BTK"), "v": (v, "BTHK"), "document_ids": (document_ids, "BT int")}
    check_operands(op, operands)
    check_window(op, window)
    if cache is not None and cache.k.shape[1] != window - 1:
        raise OperandError(
            f"{op}: cache holds {cache.k.shape[1]} tokens, but window = {window} needs {window - 1}; they must be equal"
        )


def _visible(document_ids: Tensor | None, remembered: Tensor, *, length: int) -> Tensor:
    """Causal document mask over the cached and current tokens, without the window: [B, T, W - 1 + T]."""
    if document_ids is None:
        document_ids = torch.zeros(len(remembered), length, dtype=torch.int32, device=remembered.device)
    return visible_tokens(document_ids, remembered)


def window_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, document_ids: Tensor | None = None
) -> Tensor:
    """Definition of `window_attention` without a cache, one token and head at a time -> [B, T, H, V]."""
    batch, length, heads, width = q.shape
    rows = []
    for b in range(batch):
        for t in range(length):
            start = max(0, t - window + 1)
            if document_ids is not None:
                start = max(start, int((document_ids[b] < document_ids[b, t]).sum()))
            for h in range(heads):
                scores = k[b, start : t + 1] @ q[b, t, h] / width**0.5
                weights = torch.exp(scores - scores.max().detach())
                rows.append(weights / weights.sum() @ v[b, start : t + 1, h])
    return torch.stack(rows).view(batch, length, heads, v.shape[3])


def window_attention_flops(length: int, *, window: int, num_heads: int, head_dim: int) -> int:
    """Forward floating-point operations a token: 4 min(T, W) H K, counting every window as full. Not counted:
    exponentials, sums, and pairs outside the window that a masked implementation evaluates."""
    return 4 * min(length, window) * num_heads * head_dim
