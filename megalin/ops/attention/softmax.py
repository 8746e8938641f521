"""Causal softmax attention with documents, grouped keys and values, and tokens remembered from before.

    o_t = sum over visible s of p_ts v_s,    p_t = softmax over visible s of q_t . k_s / sqrt(K)

Token t sees the tokens s <= t of its own document. `softmax_attention` is what models call: torch's fused attention.
`softmax_attention_reference` is its definition, the truth it is tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.dispatch.operands import check_one_dtype, check_operands

_WIDEST_GROUPED_HEAD = 256


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor | None = None) -> Tensor:
    """The attention above.

    Args:
        q: [B, T, H, K].
        k, v: [B, S, G, K], G key-value heads; query head h reads key-value head h // (H / G).
        visible: [1 or B, T, S] whether token t sees token s, at least one each; None: s <= t, for S = T.

    Returns:
        [B, T, H, K] in the dtype of q; scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: tensors that do not fit.
    """
    source = "BTGK" if visible is None else "BSGK"
    check_heads("softmax_attention", q, (k, source), (v, source), visible=(visible, "bTS bool"))
    # Under a mask, in fp32 and for wide heads no fused attention of a GPU has a grouped form; unfused, it holds T x S
    # scores.
    grouped = visible is None and q.is_cuda and q.element_size() == 2 and q.shape[3] <= _WIDEST_GROUPED_HEAD
    groups = q.shape[2] // k.shape[2]
    if groups > 1 and not grouped:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T or S, K]
    mask = None if visible is None else visible[:, None]
    output = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=visible is None, enable_gqa=grouped and groups > 1
    )
    return output.transpose(1, 2)


def check_heads(
    op: str, q: Tensor, k: tuple[Tensor, str], v: tuple[Tensor, str], **others: tuple[Tensor | None, str]
) -> None:
    """`check_operands` for attention: q [B, T, H, K], the rest as described, and what sizes alone do not tell.

    Raises:
        OperandError: tensors that do not fit, of several dtypes, or key-value heads G that do not divide H.
    """
    check_operands(op, {"q": (q, "BTHK"), "k": k, "v": v, **others})
    check_one_dtype(op, q=q, k=k[0], v=v[0])
    heads, groups = q.shape[2], k[0].shape[2]
    if heads % groups:
        raise OperandError(f"{op}: {groups} key-value heads do not divide {heads} query heads; use a divisor")


def check_window(op: str, window: int | None) -> None:
    """Raises OperandError for a window without room for the token itself."""
    if window is not None and window < 1:
        raise OperandError(f"{op}: a window of {window} tokens does not hold the token itself; use at least 1")


def visible_tokens(document_ids: Tensor, remembered: Tensor | None = None) -> Tensor:
    """Which tokens each sees: [B, T, S + T] for `remembered` [B, S], which tokens from before belong to the document
    of the first of the T, without it [B, T, T]. `document_ids` [B, T] is non-decreasing."""
    own = (document_ids[:, :, None] == document_ids[:, None, :]).tril()
    if remembered is None:
        return own
    before = (document_ids == document_ids[:, :1])[:, :, None] & remembered[:, None, :]
    return torch.cat([before, own], dim=-1)


def visible_in_row(positions: Tensor, length: int, document_ids: Tensor | None) -> Tensor:
    """Which tokens of rows of `length` those at `positions` [T] see: [1 or B, T, length]. `document_ids` [B, length]
    is non-decreasing; None when each row is one document."""
    visible = (torch.arange(length, device=positions.device) <= positions[:, None])[None]
    if document_ids is None:
        return visible
    return visible & (document_ids[:, positions, None] == document_ids[:, None, :])


def within_window(visible: Tensor, window: int) -> Tensor:
    """The part of `visible` [1 or B, T, S] inside the window that ends with each token, the last T of the S being the
    tokens themselves."""
    length, total = visible.shape[1:]
    token = torch.arange(total - length, total, device=visible.device)[:, None]
    return visible & (token - torch.arange(total, device=visible.device) < window)


def softmax_attention_reference(q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """The same for S = T, one token and head at a time; arguments and result as `softmax_attention`."""
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
    """Forward floating-point operations a token: 4 T H K, for q k^T and its product with v over all T x T pairs.

    That is the count of the scaling-laws paper (and of the usual utilisation figures), although the causal half,
    2 (T + 1) H K, is all that a fused kernel computes. Exponentials and sums are not counted.
    """
    return 4 * length * num_heads * head_dim
