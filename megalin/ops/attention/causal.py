"""Causal softmax attention over full sequences, by the fastest kernel for their documents.

    o_t = sum over visible s of p_ts v_s,    p_t = softmax over visible s of q_t . k_s / sqrt(K)

Token t attends to the tokens s <= t of its own document, with a window to the last `window` of them, and with sinks to
the document's first `num_sinks` too. Packed documents and windows use a flash kernel, which needs no T x S mask;
sequences of one document use flash-attn-4 or torch's fused attention; cases that none supports, sinks among them, use
fused attention with that mask. With queries for the last T of S tokens only, the flash kernel gets zero queries for
the other tokens, whose outputs are dropped: with a window, at most S - T times its width more pairs.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError, OperandError
from megalin.ops.attention import flash4
from megalin.ops.attention.flash import FlashKernel, flash_attention, slower_reason, unavailable_reason
from megalin.ops.attention.softmax import (
    check_heads,
    check_window,
    softmax_attention,
    visible_near,
)
from megalin.ops.choices import AttentionBackend
from megalin.ops.dispatch.backend import Choice, report_choice
from megalin.ops.dispatch.compile_constants import assume_constant_result
from megalin.ops.documents import UNPACKED, PackedDocuments

_KERNELS: dict[AttentionBackend, tuple[FlashKernel, ...]] = {
    "auto": ("flash_attn_4", "torch", "flash_attn"),
    "sdpa": ("torch",),
    "flash_attn": ("flash_attn",),
    "flash_attn_4": ("flash_attn_4",),
    "mask": (),
}
"""Kernels for packed documents and windows, the first one that can run."""
_KERNELS_OF_WHOLE_ROWS: dict[AttentionBackend, tuple[FlashKernel, ...]] = {
    "auto": ("flash_attn_4",),
    "flash_attn": ("flash_attn",),
    "flash_attn_4": ("flash_attn_4",),
}
"""The same for sequences of one document; after them comes torch's fused attention."""

_log = logging.getLogger(__name__)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: PackedDocuments = UNPACKED,
    window: int | None = None,
    num_sinks: int = 0,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Causal softmax attention, as above.

    Args:
        q: [B, T, H, K], queries of the last T of S tokens.
        k, v: [B, S, G, K], G key-value heads; query head h reads key-value head h // (H / G).
        documents: of the S tokens, by default one per sequence. Documents without offsets use a mask.
        window: visible tokens, including the token itself; None for all.
        num_sinks: first tokens of a document that stay visible outside of the window; they use a mask.
        backend: flash_attn and flash_attn_4 fall back to sdpa where they cannot run.

    Returns:
        [B, T, H, K] in the dtype of q; scores and their softmax are accumulated in at least fp32.

    Raises:
        OperandError: incompatible tensors, or a window below 1.
    """
    check_heads("causal_attention", q, (k, "BSGK"), (v, "BSGK"), document_ids=(documents.ids, "BS int"))
    check_window("causal_attention", window)
    length, before = k.shape[1], k.shape[1] - q.shape[1]
    if before < 0:
        raise OperandError(f"causal_attention: {q.shape[1]} queries for {length} keys; give at most one query per key")
    ids, unpacked = documents.ids, documents.ids is None and window is None
    kind = (q.device.type, q.dtype, q.shape[3], q.shape[2] // k.shape[2])
    kernel = None if num_sinks else kernel_for(backend, unpacked, *kind, length < flash4.LONG)
    if kernel is not None and (ids is None or documents.offsets is not None):
        padded_q = functional.pad(q, (0, 0, 0, 0, before, 0)) if before else q
        return flash_attention(padded_q, k, v, documents=documents, window=window, kernel=kernel)[:, before:]
    if unpacked and not before:
        return softmax_attention(q, k, v)
    queries = torch.arange(before, length, device=q.device)
    return softmax_attention(q, k, v, visible=visible_near(queries, length, ids, window=window, num_sinks=num_sinks))


@assume_constant_result
def kernel_for(
    backend: AttentionBackend,
    unpacked: bool,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    group: int = 1,
    is_short: bool = False,
) -> FlashKernel | None:
    """Flash kernel for such tensors, None for torch's fused attention; a constant to torch.compile. `unpacked`: each
    sequence is one document, without a window; `group`: query heads of a key-value head; `is_short`: sequences of less
    than 8,192 tokens."""
    kernel, reasons = _decide(backend, unpacked, device, dtype, head_dim, group, unpacked and is_short)
    name = "torch's FlashAttention-2" if kernel == "torch" else kernel or "sdpa"
    report_choice(f"softmax_attention of {_kind(unpacked)}", Choice(name, reasons))
    return kernel


def _kind(unpacked: bool) -> str:
    """Name of the case in the log and in kernels.json."""
    return "whole rows" if unpacked else "packed rows or windows"


@functools.cache
def _decide(
    backend: AttentionBackend,
    unpacked: bool,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    is_short: bool,
) -> tuple[FlashKernel | None, str]:
    """Result of `kernel_for` with the reasons against other kernels; decided at its first use and logged."""
    chosen: FlashKernel | None = None
    reasons: list[str] = []
    for kernel in _KERNELS_OF_WHOLE_ROWS.get(backend, ()) if unpacked else _KERNELS[backend]:
        reason = slower_reason(kernel, device, is_short=is_short) if backend == "auto" else ""
        if not (reason := reason or unavailable_reason(kernel, device, dtype, head_dim, group)):
            chosen = kernel
            break
        reasons.append(f"not {kernel}: {reason}")
    kind = f"softmax attention of {_kind(unpacked)}"
    _log.info("%s, %s heads of %d on %s: %s", kind, dtype, head_dim, device, "; ".join([chosen or "sdpa", *reasons]))
    return chosen, "; ".join(reasons)


def check_backend(
    backend: AttentionBackend, device: str, dtype: torch.dtype, head_dim: int, group: int = 1, *, field: str
) -> None:
    """Raises ConfigError, naming `field`, if `backend` is a package whose kernels cannot run on such tensors."""
    if backend not in ("flash_attn", "flash_attn_4"):
        return
    if reason := unavailable_reason(backend, device, dtype, head_dim, group):
        raise ConfigError(f'{field} = "{backend}" cannot run: {reason}; use "auto" or "sdpa"')
