"""Causal softmax attention over rows that start with their first token: the fastest kernel for their documents.

    o_t = sum over visible s of p_ts v_s,    p_t = softmax over visible s of q_t . k_s / sqrt(K)

Token t sees the tokens s <= t of its own document, the last `window` of them where there is a window. Rows of one
document go to torch's fused attention, packed documents and windows to a flash kernel, which needs no mask of T x S;
what neither takes goes to fused attention under that mask. Where the last T of S tokens alone ask, a kernel is given
zeros as queries of the others, and those results are dropped: with a window, at most S - T times its width pairs more.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError, OperandError
from megalin.ops.attention.flash import FlashKernel, flash_attention, reason_against
from megalin.ops.attention.softmax import (
    check_heads,
    check_window,
    softmax_attention,
    visible_in_row,
    within_window,
)
from megalin.ops.dispatch.backend import Choice, report_choice
from megalin.ops.documents import WHOLE_ROWS, Documents

AttentionBackend = Literal["auto", "sdpa", "flash_attn"]
"""sdpa: PyTorch's own. flash_attn: the package flash-attn (see check_backend). auto: sdpa, and the package for packed
rows and windows that PyTorch has no kernel for."""

_KERNELS: dict[AttentionBackend, tuple[FlashKernel, ...]] = {
    "auto": ("torch", "flash_attn"),
    "sdpa": ("torch",),
    "flash_attn": ("flash_attn",),
}

_log = logging.getLogger(__name__)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Documents = WHOLE_ROWS,
    window: int | None = None,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """The attention above.

    Args:
        q: [B, T, H, K], of the last T of S tokens.
        k, v: [B, S, G, K], G key-value heads; query head h reads key-value head h // (H / G).
        documents: of the S tokens, by default one a row. Where nobody looked where they start, they take a mask.
        window: visible tokens, the token itself included; None for all.
        backend: flash_attn where it cannot run is as sdpa.

    Returns:
        [B, T, H, K] in the dtype of q; scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: tensors that do not fit, or a window below 1.
    """
    check_heads("causal_attention", q, (k, "BSGK"), (v, "BSGK"), document_ids=(documents.ids, "BS int"))
    check_window("causal_attention", window)
    length, before = k.shape[1], k.shape[1] - q.shape[1]
    if before < 0:
        raise OperandError(f"causal_attention: {q.shape[1]} queries of {length} tokens; give at most one a token")
    ids, whole = documents.ids, documents.ids is None and window is None
    kernel = kernel_for(backend, whole, q.device.type, q.dtype, q.shape[3])
    if kernel is not None and (ids is None or documents.offsets is not None):
        asked = functional.pad(q, (0, 0, 0, 0, before, 0)) if before else q
        return flash_attention(asked, k, v, documents=documents, window=window, kernel=kernel)[:, before:]
    if whole and not before:
        return softmax_attention(q, k, v)
    visible = visible_in_row(torch.arange(before, length, device=q.device), length, ids)
    return softmax_attention(q, k, v, visible=visible if window is None else within_window(visible, window))


@torch.compiler.assume_constant_result
def kernel_for(
    backend: AttentionBackend, whole: bool, device: str, dtype: torch.dtype, head_dim: int
) -> FlashKernel | None:
    """The flash kernel that attends to such tensors, `whole` rows or others, None for torch's fused attention; a
    constant to torch.compile."""
    kernel, reasons = _decide(backend, whole, device, dtype, head_dim)
    name = "torch's FlashAttention-2" if kernel == "torch" else kernel or "sdpa"
    report_choice(f"softmax_attention of {_kind(whole)}", Choice(name, reasons))
    return kernel


def _kind(whole: bool) -> str:
    return "whole rows" if whole else "packed rows or windows"


@functools.cache
def _decide(
    backend: AttentionBackend, whole: bool, device: str, dtype: torch.dtype, head_dim: int
) -> tuple[FlashKernel | None, str]:
    """`kernel_for`, and why not another; decided at its first use and logged."""
    taken: FlashKernel | None = None
    reasons: list[str] = []
    for kernel in () if whole and backend != "flash_attn" else _KERNELS[backend]:
        if not (reason := reason_against(kernel, device, dtype, head_dim)):
            taken = kernel
            break
        reasons.append(f"not {kernel}: {reason}")
    kind = f"softmax attention of {_kind(whole)}"
    _log.info("%s, %s heads of %d on %s: %s", kind, dtype, head_dim, device, "; ".join([taken or "sdpa", *reasons]))
    return taken, "; ".join(reasons)


def check_backend(backend: AttentionBackend, device: str, dtype: torch.dtype, head_dim: int, *, field: str) -> None:
    """Raises ConfigError, naming `field`, where flash_attn was asked for and cannot run on such tensors."""
    if backend == "flash_attn" and (reason := reason_against("flash_attn", device, dtype, head_dim)):
        raise ConfigError(f'{field} = "flash_attn" cannot run: {reason}; use "auto" or "sdpa"')
