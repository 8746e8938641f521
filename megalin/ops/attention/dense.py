"""Attention without a softmax over all tokens of a document: quadratic, linear and token-by-token forms.

    y_t = sum over s of t's document of (q_t . k_s) v_s

`dense_attention` chooses the cheaper of (Q K^T) V and Q (K^T V), the same function with the matmuls in another order.
Both are tested against the definition, `dense_attention_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import OperandError
from megalin.ops.choices import DenseForm
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_one_dtype, check_operands
from megalin.ops.positions.encodings import document_spans
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_flops

CHUNK = 64
"""Tokens a chunk of the linear form's scans over packed documents."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None = None, form: DenseForm = "auto"
) -> Tensor:
    """Attention without a softmax, the sum above, by default in the cheaper form.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        document_ids: [B, T] integers, non-decreasing along T; None where each sequence is one document.
        form: order of the matmuls.

    Returns:
        [B, T, H, V] in the dtype of v.

    Raises:
        OperandError: incompatible tensors, or different dtypes.

    Source: DenseAttention, section 3.
    """
    operands = {"q": (q, "BTHK"), "k": (k, "BTHK"), "v": (v, "BTHV"), "document_ids": (document_ids, "BT int")}
    check_operands("dense_attention", operands)
    check_one_dtype("dense_attention", q=q, k=k, v=v)
    length, key_dim, value_dim = q.shape[1], q.shape[3], v.shape[3]
    quadratic, linear = 2 * length * (key_dim + value_dim), 4 * key_dim * value_dim
    if document_ids is not None:
        scan = decay_scan_flops(length, num_heads=1, key_dim=key_dim, value_dim=value_dim, chunk_size=CHUNK)
        linear = 2 * scan
    is_quadratic = quadratic < linear if form == "auto" else form == "quadratic"
    compute = dense_attention_quadratic if is_quadratic else dense_attention_linear
    return compute(q, k, v, document_ids=document_ids)


def local_dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    offset: int = 0,
    document_ids: Tensor | None = None,
    form: DenseForm = "auto",
) -> Tensor:
    """Attention without a softmax within the window of t only; arguments and result as `dense_attention`.

    Each document is divided into consecutive windows of `window` tokens; the first begins `offset` < window tokens
    before the document.
    """
    check_operands("local_dense_attention", {"q": (q, "BTHK"), "document_ids": (document_ids, "BT int")})
    if not 0 <= offset < window:
        raise OperandError(
            f"local_dense_attention: windows of {window} tokens cannot start {offset} before a document; the offset "
            "must be at least 0 and below the window"
        )
    batch, length = q.shape[:2]
    if document_ids is None:
        padding = (0, 0, 0, 0, offset, -(length + offset) % window)
        q, k, v = (functional.pad(x, padding).unflatten(1, (-1, window)).flatten(0, 1) for x in (q, k, v))
        y = dense_attention(q, k, v, form=form)  # [B n, window, H, V]
        return y.unflatten(0, (batch, -1)).flatten(1, 2)[:, offset : offset + length]
    windows = window_ids(torch.arange(length, device=q.device), window=window, offset=offset, document_ids=document_ids)
    return dense_attention(q, k, v, document_ids=windows, form=form)


def window_ids(index: Tensor, *, window: int, offset: int, document_ids: Tensor | None) -> Tensor:
    """Window ids of `local_dense_attention`, non-decreasing: index [T] of tokens 0 .. T - 1, document_ids [B, T] or
    None for one document per sequence -> [B or 1, T]."""
    if document_ids is None:
        return ((index + offset) // window)[None]
    first = document_spans(document_ids).first
    return ((index == first) | ((index - first + offset) % window == 0)).cumsum(1)


def dense_memory(k: Tensor, v: Tensor, *, kept: Tensor | None = None) -> Tensor:
    """Memory matrix sum_t k_t v_t^T over the tokens `kept` [1 or B, T] (None: all): [B, T, H, K], [B, T, H, V] ->
    [B, H, K, V] in at least fp32. Its entries grow with T."""
    wide = compute_dtype(v)
    k = k.to(wide) if kept is None else k.to(wide).where(kept[..., None, None], 0.0)
    return k.permute(0, 2, 3, 1) @ v.to(wide).transpose(1, 2)


def read_memory(q: Tensor, memory: Tensor) -> Tensor:
    """Computes y_t = memory^T q_t: [B, T, H, K], [B, H, K, V] -> [B, T, H, V] in the dtype of the memory."""
    return (q.to(memory.dtype).transpose(1, 2) @ memory).transpose(1, 2)


def dense_attention_quadratic(q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """(Q K^T) V, in the dtype of v; arguments and result as `dense_attention`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, K or V]
    scores = q @ k.mT  # [B, H, T, T]
    if document_ids is not None:
        same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
        scores = scores.masked_fill(~same, 0.0)
    return (scores @ v).transpose(1, 2)


def dense_attention_linear(q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """Q (K^T V), the inner matmul in at least fp32, as its entries grow with T. Arguments as `dense_attention`.

    Packed documents have a K^T V each: the state of a forward scan without decay plus that of a backward scan, minus
    the token itself, which both count.
    """
    if document_ids is None:
        return read_memory(q, dense_memory(k, v)).to(v.dtype)
    dtype, wide = v.dtype, compute_dtype(v)
    q, k, v = (x.to(wide) for x in (q, k, v))
    before = decay_scan(q, k, v, None, document_ids=document_ids, chunk_size=CHUNK).output
    later_q, later_k, later_v = (x.flip(1) for x in (q, k, v))
    later_ids = -document_ids.flip(1)
    after = decay_scan(later_q, later_k, later_v, None, document_ids=later_ids, chunk_size=CHUNK).output
    return (before + after.flip(1) - (q * k).sum(-1, keepdim=True) * v).to(dtype)


def dense_attention_reference(q: Tensor, k: Tensor, v: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """Definition of `dense_attention`, one token t at a time; the same arguments and result."""
    rows = []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            own = slice(None) if document_ids is None else document_ids[b] == document_ids[b, t]
            products = (q[b, t] * k[b, own]).sum(-1, keepdim=True)  # [S, H, 1]
            rows.append((products * v[b, own]).sum(0))
    return torch.stack(rows).view_as(v)


def dense_attention_flops(length: int, *, num_heads: int, head_dim: int, form: DenseForm = "auto") -> int:
    """Forward floating-point operations a token over documents of T = `length` tokens, multiply and add counted as
    two, a head: 4 K^2 of the linear form, 4 T K of the quadratic one, the smaller of them with auto."""
    terms = {"auto": min(length, head_dim), "linear": head_dim, "quadratic": length}
    return 4 * terms[form] * head_dim * num_heads
