"""Kernels of the package flash-attn-4, written in CuTe DSL and compiled at their first use."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch
from torch import Tensor

from megalin._triton.dispatch.cache_folder import cache_folder

MEASURED = (9, 0)
"""The compute capability on which they were measured to be faster than PyTorch's."""
LONG = 8192
"""Tokens of a sequence of one document from which they were faster than cuDNN's. They keep the host longer, by
0.8 ms a forward and backward; at 2,048 tokens an eager call takes longer with them, on the device less."""
LOWEST = (9, 0)
"""Below it the package has no backward."""


@functools.cache
def _interface() -> Any:
    """Module with the forward and backward that PyTorch's own hook for this package calls; imported in seconds.

    Compiled kernels are kept in MEGALIN_CACHE/flash_attn_4, unless the package's own variables say otherwise: their
    compilation takes about 4 seconds each.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash_attn_4"))
    return importlib.import_module("flash_attn.cute.interface")


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int) -> tuple[Tensor, Tensor]:
    """Output [N, H, K] and log-sum-exp [H, N] of tokens q [N, H, K], k, v [N, G, K] in documents.

    Args:
        starts: [D + 1] int32, each document's first token and the last one's end.
        longest: at least the tokens of the longest document.
        window: visible tokens, 0 for all.
    """
    output, sums, *_ = _interface()._flash_attn_fwd(q, k, v, return_lse=True, **_options(starts, longest, window))
    return output, sums


def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    starts: Tensor,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, with the arguments and results of `attend`; in one order of additions under
    torch.use_deterministic_algorithms."""
    exact = torch.are_deterministic_algorithms_enabled()
    options = _options(starts, longest, window)
    dq, dk, dv, *_ = _interface()._flash_attn_bwd(q, k, v, output, dy, sums, deterministic=exact, **options)
    return dq, dk, dv


def _options(starts: Tensor, longest: int, window: int) -> dict[str, Any]:
    return {
        "causal": not window,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
