"""The state that a run of tokens leaves behind when it starts from zero: what the fold over a split sequence adds up.

Each function is the state of its scan without the outputs: one product of keys and values, every one decayed to the
end of the run, of the last token's document alone. Exponents are sums of log decays over the tokens between, <= 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.chunks import sum_after, visible_decay
from megalin.ops.operands import check_operands
from megalin.ops.srmsnorm import compute_dtype


def decay_state(k: Tensor, v: Tensor, slopes: Tensor | None, *, document_ids: Tensor | None = None) -> Tensor:
    """sum_t exp(-s (T - 1 - t)) k_t v_t^T, the state of `decay_scan`.

    Args:
        k: [B, T, H, K].
        v: [B, T, H, V].
        slopes: [H], s >= 0, at least fp32 (a buffer: it gets no gradient); None for no decay.
        document_ids: [B, T] integers; None when each row is one document.

    Returns:
        [B, H, K, V] in at least fp32.

    Raises:
        OperandError: tensors whose shapes, kinds or devices do not fit together.
    """
    operands = {"k": (k, "BTHK"), "v": (v, "BTHV"), "slopes": (slopes, "H"), "document_ids": (document_ids, "BT int")}
    check_operands("decay_state", operands)
    wide = compute_dtype(v)
    weight = _kept(document_ids, k)[..., None].to(wide)  # [1 or B, T, 1]
    if slopes is not None:
        to_end = torch.arange(k.shape[1] - 1, -1, -1, device=k.device)
        weight = weight * torch.exp(-to_end[:, None] * slopes.to(wide))  # [1 or B, T, H]
    return torch.einsum("bthk,bthv->bhkv", k.to(wide) * weight[..., None], v.to(wide))


def selected_state(k: Tensor, v: Tensor, log_decay: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """sum_t (exp(sum of g_j over j > t) k_t) v_t^T, the state of `vector_decay_scan` and `scalar_decay_scan`.

    Args:
        k: [B, T, H, K], or [B, T, 1, K] for all heads of v, with a decay a head.
        v: [B, T, H, V].
        log_decay: g [B, T, H, K], or [B, T, H, 1] for a decay a head; <= 0, at least fp32.
        document_ids: [B, T] integers; None when each row is one document.

    Returns:
        [B, H, K, V] in at least fp32.

    Raises:
        OperandError: tensors whose shapes, kinds or devices do not fit together.
    """
    operands = {"v": (v, "BTHV"), "k": (k, "BThK"), "log_decay": (log_decay, "BTHk")}
    check_operands("selected_state", operands | {"document_ids": (document_ids, "BT int")})
    wide = compute_dtype(v)
    exponent = sum_after(log_decay.to(wide).transpose(1, 2))  # [B, H, T, K or 1]
    to_end = visible_decay(exponent, _kept(document_ids, k)[:, None]).transpose(1, 2)
    k, v = k.to(wide), v.to(wide)
    # A decay a head goes to the values: one head of keys may serve them all.
    k, v = (k, v * to_end) if log_decay.shape[-1] == 1 else (k * to_end, v)
    return torch.einsum("bthk,bthv->bhkv", k, v)


def tpe_state(x: Tensor, coefficients: Tensor, log_decay: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """B[c, e] sum_t lambda_e^(T - 1 - t) x_t[c], the state of `tpe`.

    Args:
        x: [B, T, D].
        coefficients: B [D, E].
        log_decay: log lambda [E], <= 0, at least fp32.
        document_ids: [B, T] integers; None when each row is one document.

    Returns:
        [B, D, E] in at least fp32.

    Raises:
        OperandError: tensors whose shapes, kinds or devices do not fit together.
    """
    operands = {"x": (x, "BTD"), "coefficients": (coefficients, "DE"), "log_decay": (log_decay, "E")}
    check_operands("tpe_state", operands | {"document_ids": (document_ids, "BT int")})
    wide = compute_dtype(x)
    to_end = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    powers = torch.exp(to_end[:, None] * log_decay.to(wide)) * _kept(document_ids, x)[..., None]  # [1 or B, T, E]
    return coefficients.to(wide) * (x.to(wide).mT @ powers)


def _kept(document_ids: Tensor | None, x: Tensor) -> Tensor:
    """[1 or B, T] bool, whether a token is of the last one's document."""
    if document_ids is None:
        return torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device)
    return document_ids == document_ids[:, -1:]
