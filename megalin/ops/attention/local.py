"""Softmax attention to a window with sinks, or inside blocks, over a cache of fixed size, with grouped keys and values.

    o_t = sum over visible s of p_ts v_s,    p_t = softmax over visible s of q_t . k_s / sqrt(K)

Token t attends to tokens s <= t of its own document: in a window of W tokens to t - W + 1 .. t, and to the document's
first P tokens, its sinks; in blocks of W tokens, counted from the document's start, to those of its own block. Without
a cache this is `causal_attention`, whose documents are the blocks (`block_ids`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.attention.causal import causal_attention
from megalin.ops.attention.dense import window_ids
from megalin.ops.attention.softmax import check_heads, check_window, softmax_attention, visible_tokens
from megalin.ops.choices import AttentionBackend
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.positions.encodings import document_spans


class LocalCache(NamedTuple):
    """P slots for the sinks of the last token's document, in order, then W - 1 for the last other tokens, oldest first;
    empty slots are zero."""

    k: Tensor
    """[B, P + W - 1, G, K]."""
    v: Tensor
    """[B, P + W - 1, G, K]."""
    remembered: Tensor
    """[B, P + W - 1], 1 where the slot holds a token that later ones may attend to, else 0."""


class LocalAttentionOutput(NamedTuple):
    """Result of `local_attention`."""

    output: Tensor
    """[B, T, H, K] in the dtype of q."""
    cache: LocalCache
    """Cache after the last token, in the dtype of the input cache."""


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LocalCache,
    *,
    window: int,
    num_sinks: int = 0,
    blocks: bool = False,
    document_ids: Tensor | None = None,
) -> LocalAttentionOutput:
    """Attention of T tokens after those of a cache, as above; the first token continues the cache's document.

    Args:
        q: [B, T, H, K].
        k, v: [B, T, G, K], G key-value heads; query head h reads key-value head h // (H / G).
        window: W, visible tokens or those of a block, including the token itself.
        num_sinks: P; none with blocks.
        blocks: True for blocks in place of a window.
        document_ids: [B, T] integers, non-decreasing along T; None where all tokens are of the cache's document.

    Returns:
        LocalAttentionOutput. Scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: incompatible tensors, or a window below 1.

    Source: StreamingLLM (window with sinks); TransNormer's DiagAttention (blocks).
    """
    _check(q, k, v, cache, window, num_sinks, document_ids)
    assert not (blocks and num_sinks), num_sinks
    length, remembered = q.shape[1], cache.remembered > 0
    if document_ids is None:
        document_ids = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
    # Tokens of the first document before these: in its block, or its sinks.
    before = remembered.sum(1) if blocks else remembered[:, :num_sinks].sum(1)
    index = _index_in_document(document_ids, before)
    groups = (index % window == 0).cumsum(1) if blocks else document_ids
    own = visible_tokens(groups, remembered)  # [B, T, P + W - 1 + T]
    near = _within_window(index < num_sinks, window=window, num_sinks=num_sinks)
    keys, values = (torch.cat([old.to(new.dtype), new], dim=1) for old, new in ((cache.k, k), (cache.v, v)))
    output = softmax_attention(q, keys, values, visible=own & near)
    kept = own[:, -1]
    if blocks:
        kept = kept & ((index[:, -1:] + 1) % window != 0)  # a full block ends with its last token
    places = torch.arange(num_sinks, device=q.device)[:, None]
    chosen = kept[:, None, -length:] & (index[:, None] == places)  # [B, P, T]
    kept = torch.cat([kept[:, :-length], kept[:, -length:] & (index >= num_sinks)], dim=1)
    next_k, next_v = (_next_slots(old, new, kept, chosen) for old, new in ((cache.k, k), (cache.v, v)))
    flags = torch.cat([kept[:, :num_sinks] | chosen.any(-1), kept[:, num_sinks + length :]], dim=1)
    return LocalAttentionOutput(output, LocalCache(next_k, next_v, flags.to(cache.remembered.dtype)))


def _index_in_document(document_ids: Tensor, before: Tensor) -> Tensor:
    """[B, T] tokens of its document before each, where `before` [B] of the first token's are not among the T."""
    first = document_spans(document_ids).first
    index = torch.arange(document_ids.shape[1], device=document_ids.device) - first
    return torch.where(first == 0, index + before[:, None], index)


def _within_window(sinks: Tensor, *, window: int, num_sinks: int) -> Tensor:
    """[B, T, P + W - 1 + T], True for the sinks and for the window of each token: `sinks` [B, T] of the T tokens."""
    batch, length = sinks.shape
    token = torch.arange(length, device=sinks.device)
    place = torch.cat([torch.arange(1 - window, 0, device=sinks.device), token])
    near = functional.pad(token[:, None] - place < window, (num_sinks, 0), value=True)
    cached = torch.zeros(batch, num_sinks + window - 1, dtype=torch.bool, device=sinks.device)
    return near | torch.cat([cached, sinks], dim=1)[:, None]


def _next_slots(old: Tensor, new: Tensor, kept: Tensor, chosen: Tensor) -> Tensor:
    """The slots of keys or values after the new tokens: old [B, P + W - 1, G, K], new [B, T, G, K]; `kept`
    [B, P + W - 1 + T] of both, without the new sinks, which `chosen` [B, P, T] puts into their slots."""
    num_sinks, length = chosen.shape[1:]
    both = torch.cat([old, new.to(old.dtype)], dim=1).masked_fill(~kept[..., None, None], 0.0)
    sinks = torch.einsum("bpt,btgk->bpgk", chosen.to(old.dtype), new.to(old.dtype))
    return torch.cat([both[:, :num_sinks] + sinks, both[:, num_sinks + length :]], dim=1)


def block_ids(length: int, *, block: int, document_ids: Tensor | None, device: torch.device) -> Tensor:
    """Ids of the blocks of full sequences, non-decreasing: [1 or B, T]; each document starts a block."""
    return window_ids(torch.arange(length, device=device), window=block, offset=0, document_ids=document_ids)


def block_attention(q: Tensor, k: Tensor, v: Tensor, *, block: int, backend: AttentionBackend = "auto") -> Tensor:
    """Causal attention inside blocks of sequences of one document, the blocks as sequences of their own.

    Arguments and result as those of `causal_attention`, with as many queries as keys. Raises OperandError.
    """
    check_heads("block_attention", q, (k, "BTGK"), (v, "BTGK"))
    check_window("block_attention", block)
    length = q.shape[1]
    block = min(block, length)
    padding = (0, 0, 0, 0, 0, -length % block)
    q, k, v = (functional.pad(x, padding).unflatten(1, (-1, block)).flatten(0, 1) for x in (q, k, v))
    y = causal_attention(q, k, v, backend=backend)
    return y.unflatten(0, (-1, -(-length // block))).flatten(1, 2)[:, :length]


def _check(
    q: Tensor, k: Tensor, v: Tensor, cache: LocalCache, window: int, num_sinks: int, document_ids: Tensor | None
) -> None:
    op = "local_attention"
    check_window(op, window)
    check_heads(op, q, (k, "BTGK"), (v, "BTGK"), document_ids=(document_ids, "BT int"))
    shapes = {"cache.k": (cache.k, "BSGK"), "cache.v": (cache.v, "BSGK"), "cache.remembered": (cache.remembered, "BS")}
    check_operands(op, {"k": (k, "BTGK"), **shapes})
    if cache.k.shape[1] != num_sinks + window - 1:
        raise OperandError(
            f"{op}: cache has {cache.k.shape[1]} slots, but window = {window} and {num_sinks} sinks need "
            f"{num_sinks + window - 1}; they must be equal"
        )
