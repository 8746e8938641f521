"""Causal softmax attention in a sliding window, with one key for all heads and a cache of fixed size.

    o_th = sum over visible s of p_ths v_sh,    p_th = softmax over visible s of q_th . k_s / sqrt(K)

Token t sees the `window` tokens t - window + 1 .. t as far as they are of its document. `window_attention` is what
models call: torch's fused attention under a mask. `window_attention_reference` is the truth it is tested against.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class WindowCache(NamedTuple):
    """The last window - 1 tokens, oldest first; what is not remembered is zero."""

    k: Tensor
    """[B, W - 1, K]."""
    v: Tensor
    """[B, W - 1, H, V]."""
    remembered: Tensor
    """[B, W - 1], 1 where the place holds a token of the last token's document, else 0."""


class WindowAttentionOutput(NamedTuple):
    """Result of windowed attention."""

    output: Tensor
    """[B, T, H, V] in the dtype of q."""
    cache: WindowCache | None
    """After the last token, in the dtype of the one that was given; None without one."""


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    document_ids: Tensor | None = None,
    cache: WindowCache | None = None,
) -> WindowAttentionOutput:
    """The attention above.

    Args:
        q: [B, T, H, K].
        k: [B, T, K], shared by the heads.
        v: [B, T, H, V].
        window: W, the visible tokens, the token itself included.
        document_ids: [B, T] integers, non-decreasing; None when each row is one document.
        cache: the tokens before the first, of its document.

    Returns:
        WindowAttentionOutput. Scores and their softmax are accumulated in at least fp32.

    Source: Rodimus+ section 3.2.
    """
    remembered = None if cache is None else cache.remembered > 0
    visible = _visible(document_ids, remembered, window=window, batch=q.shape[0], length=q.shape[1], device=q.device)
    if cache is not None:
        k, v = torch.cat([cache.k.to(k.dtype), k], dim=1), torch.cat([cache.v.to(v.dtype), v], dim=1)
    keys = k[:, None].expand(-1, q.shape[2], -1, -1)  # [B, H, S, K]
    output = functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, v.transpose(1, 2), attn_mask=_within(visible, window)[:, None]
    ).transpose(1, 2)
    if cache is None:
        return WindowAttentionOutput(output, None)
    past = k.shape[1] - (window - 1)
    kept = visible[:, -1, past:].expand(q.shape[0], -1)  # of the last token's document
    next_k = k[:, past:].masked_fill(~kept[..., None], 0.0).to(cache.k.dtype)
    next_v = v[:, past:].masked_fill(~kept[..., None, None], 0.0).to(cache.v.dtype)
    return WindowAttentionOutput(output, WindowCache(next_k, next_v, kept.to(cache.remembered.dtype)))


def _visible(
    document_ids: Tensor | None,
    remembered: Tensor | None,
    *,
    window: int,
    batch: int,
    length: int,
    device: torch.device,
) -> Tensor:
    """[1 or B, T, S]: whether tokens from before and of now (S = W - 1 + T, or T without a cache) are not after the
    token and of its document, however far back."""
    if document_ids is None:
        own = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        first = own.new_ones(1, length)
    else:
        own = (document_ids[:, :, None] == document_ids[:, None, :]).tril()
        first = document_ids == document_ids[:, :1]
    if remembered is None:
        return own
    before = first[:, :, None] & remembered[:, None, :]
    assert before.shape == (batch, length, window - 1), (before.shape, window)
    return torch.cat([before, own.expand(batch, -1, -1)], dim=-1)


def _within(visible: Tensor, window: int) -> Tensor:
    """The part of `visible` [1 or B, T, S] inside the window, the last T of the S being the tokens themselves."""
    length, total = visible.shape[1:]
    token = torch.arange(total - length, total, device=visible.device)[:, None]
    return visible & (token - torch.arange(total, device=visible.device) < window)


def window_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, document_ids: Tensor | None = None
) -> Tensor:
    """The same without a cache, one token and head at a time -> [B, T, H, V]."""
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
    """Forward floating-point operations a token: 4 min(T, W) H K, as if every window were full. Exponentials and sums
    are not counted, nor the pairs outside the window that a masked implementation evaluates."""
    return 4 * min(length, window) * num_heads * head_dim
