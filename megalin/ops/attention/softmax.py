"""Causal softmax attention with documents, grouped keys and values, and cached tokens.

    o_t = sum over visible s of p_ts v_s,    p_t = softmax over visible s of q_t . k_s / sqrt(K)

Token t attends to the tokens s <= t of its own document. Models call `softmax_attention`, torch's fused attention, and
for a token of decoding `softmax_attention_step`; both are tested against the definition, `softmax_attention_reference`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.dispatch.operands import check_one_dtype, check_operands
from megalin.ops.positions.encodings import document_spans

_WIDEST_GROUPED_HEAD = 256


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor | None = None) -> Tensor:
    """Softmax attention, as above, by torch's fused attention.

    Args:
        q: [B, T, H, K].
        k, v: [B, S, G, K], G key-value heads; query head h reads key-value head h // (H / G).
        visible: [1 or B, T, S], True where token t attends to token s, at least one per t; None: s <= t, for S = T.

    Returns:
        [B, T, H, K] in the dtype of q; scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: incompatible tensors.
    """
    source = "BTGK" if visible is None else "BSGK"
    check_heads("softmax_attention", q, (k, source), (v, source), visible=(visible, "bTS bool"))
    # With a mask, in fp32 or for wide heads no fused GPU attention has a grouped form; unfused, it stores T x S scores.
    grouped = visible is None and q.is_cuda and q.element_size() == 2 and q.shape[3] <= _WIDEST_GROUPED_HEAD
    groups = q.shape[2] // k.shape[2]
    if groups > 1 and not grouped:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T or S, K]
    mask = None if visible is None else visible[:, None]
    if q.is_meta:
        return _fused_on_meta(q, k, v, mask, is_causal=visible is None).transpose(1, 2)
    output = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=visible is None, enable_gqa=grouped and groups > 1
    )
    return output.transpose(1, 2)


def _fused_on_meta(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Torch's fused attention of CPUs, which stores no T x S scores; on meta torch itself takes the unfused one.

    Args:
        q: [B, H, T, K].
        k, v: [B, H, S, K].
        mask: [1 or B, 1, T, S] bool, or None.

    Returns:
        [B, H, T, K].
    """
    if mask is not None:
        zero, hidden = (torch.scalar_tensor(bias, dtype=q.dtype, device=q.device) for bias in (0.0, -math.inf))
        mask = torch.where(mask, zero, hidden)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = attention(q, k, v, is_causal=is_causal, attn_mask=mask)[0]
    return output


class KeyValueCache(NamedTuple):
    """Keys and values of earlier tokens in S slots, in any order: attention does not depend on it."""

    k: Tensor
    """[B, S, G, K]."""
    v: Tensor
    """[B, S, G, K]."""
    remembered: Tensor
    """[B, S], 1 where the slot holds a visible token; 0: it is empty."""


def softmax_attention_step(q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache) -> Tensor:
    """Softmax attention of each sequence's next token to the cached tokens and itself.

    Its key and value are first written to an empty slot of the cache, in place: no tensor changes its size, and the
    host reads nothing, so steps can be replayed as a CUDA graph. The work is that of S tokens, however few are visible.

    Args:
        q: [B, 1, H, K].
        k, v: [B, 1, G, K], G key-value heads; query head h reads key-value head h // (H / G).
        cache: with at least one empty slot for each sequence; a full one would lose a token.

    Returns:
        [B, 1, H, K] in the dtype of q; scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: incompatible tensors, or a cache without slots.
    """
    check_heads("softmax_attention_step", q, (k, "BTGK"), (v, "BTGK"))
    kinds = {"cache.k": (cache.k, "BSGK"), "cache.v": (cache.v, "BSGK"), "cache.remembered": (cache.remembered, "BS")}
    check_operands("softmax_attention_step", {"k": (k, "BTGK"), **kinds})
    if q.shape[1] != 1 or cache.k.shape[1] == 0:
        raise OperandError(
            f"softmax_attention_step: {q.shape[1]} tokens and {cache.k.shape[1]} slots; give one token of each "
            "sequence and a cache with an empty slot"
        )
    slot = cache.remembered.argmin(1, keepdim=True)  # [B, 1]
    cache.remembered.scatter_(1, slot, 1.0)
    place = slot[..., None, None].expand_as(k)
    cache.k.scatter_(1, place, k.to(cache.k.dtype))
    cache.v.scatter_(1, place, v.to(cache.v.dtype))
    # The queries of a key-value head become tokens of one head, so that keys and values need not be repeated.
    queries = q.unflatten(2, (k.shape[2], -1)).squeeze(1).transpose(1, 2)  # [B, H / G, G, K]
    visible = (cache.remembered > 0)[:, None].expand(-1, queries.shape[1], -1)  # [B, H / G, S]
    y = softmax_attention(queries, cache.k.to(q.dtype), cache.v.to(q.dtype), visible=visible)
    return y.transpose(1, 2).reshape_as(q)


def check_heads(
    op: str, q: Tensor, k: tuple[Tensor, str], v: tuple[Tensor, str], **others: tuple[Tensor | None, str]
) -> None:
    """Runs `check_operands` for attention, q [B, T, H, K] and the rest with the given sizes, and checks the heads.

    Raises:
        OperandError: incompatible tensors, different dtypes, or key-value heads G that do not divide H.
    """
    check_operands(op, {"q": (q, "BTHK"), "k": k, "v": v, **others})
    check_one_dtype(op, q=q, k=k[0], v=v[0])
    heads, groups = q.shape[2], k[0].shape[2]
    if heads % groups:
        raise OperandError(f"{op}: {groups} key-value heads do not divide {heads} query heads; use a divisor")


def check_window(op: str, window: int | None) -> None:
    """Raises OperandError for a window below 1, the token itself."""
    if window is not None and window < 1:
        raise OperandError(f"{op}: window = {window} excludes the token itself; use at least 1")


def visible_tokens(document_ids: Tensor, remembered: Tensor | None = None) -> Tensor:
    """Causal document mask [B, T, S + T], True where visible; [B, T, T] without `remembered`. `document_ids` [B, T] is
    non-decreasing; `remembered` [B, S] marks the cached tokens in the document of the first of the T."""
    own = (document_ids[:, :, None] == document_ids[:, None, :]).tril()
    if remembered is None:
        return own
    before = (document_ids == document_ids[:, :1])[:, :, None] & remembered[:, None, :]
    return torch.cat([before, own], dim=-1)


def visible_in_sequence(positions: Tensor, length: int, document_ids: Tensor | None) -> Tensor:
    """Causal document mask of the tokens at `positions` [T] over full sequences: [1 or B, T, length], True where
    visible. `document_ids` [B, length] is non-decreasing; None when each sequence is one document."""
    visible = (torch.arange(length, device=positions.device) <= positions[:, None])[None]
    if document_ids is None:
        return visible
    return visible & (document_ids[:, positions, None] == document_ids[:, None, :])


def within_window(visible: Tensor, window: int) -> Tensor:
    """Restricts `visible` [1 or B, T, S] to the window that ends with each token; the tokens are the last T of S."""
    length, total = visible.shape[1:]
    token = torch.arange(total - length, total, device=visible.device)[:, None]
    return visible & (token - torch.arange(total, device=visible.device) < window)


def visible_near(
    positions: Tensor, length: int, document_ids: Tensor | None, *, window: int | None, num_sinks: int = 0
) -> Tensor:
    """`visible_in_sequence` within the `window` that ends with each token (None: without one), and with the first
    `num_sinks` tokens of its document: [1 or B, T, length]."""
    visible = visible_in_sequence(positions, length, document_ids)
    if window is None:
        return visible
    token = torch.arange(length, device=positions.device)
    near = positions[:, None] - token < window
    if not num_sinks:
        return visible & near
    first = token.new_zeros(1, 1) if document_ids is None else document_spans(document_ids).first
    return visible & (near | (token - first < num_sinks)[:, None])


def softmax_attention_reference(q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """Definition of `softmax_attention` for S = T, one token and head at a time; the same arguments and result."""
    batch, length, heads, width = q.shape
    group = heads // k.shape[2]
    rows = []
    for b in range(batch):
        for t in range(length):
            start = 0 if document_ids is None else int((document_ids[b] < document_ids[b, t]).sum())
            for h in range(heads):
                scores = k[b, start : t + 1, h // group] @ q[b, t, h] / width**0.5
                weights = torch.exp(scores - scores.max().detach())
                rows.append(weights / weights.sum() @ v[b, start : t + 1, h // group])
    return torch.stack(rows).view(batch, length, heads, width)


def softmax_attention_flops(length: int, *, num_heads: int, head_dim: int) -> int:
    """Forward floating-point operations a token: 4 T H K, for the matmuls q k^T and p v over all T x T pairs.

    The convention of the scaling-laws paper and of the usual utilisation figures; a fused kernel computes only the
    causal half, 2 (T + 1) H K. Exponentials and sums are not counted.
    """
    return 4 * length * num_heads * head_dim
