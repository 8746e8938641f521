"""Causal softmax attention of whole documents by flash kernels, torch's own or those of the flash-attn package: where
they run and agree with attention under a mask."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megalin.ops.documents import find_documents
from megalin.ops.softmax_attention import softmax_attention, visible_tokens, within_window

FlashKernel = Literal["flash_attn", "varlen"]
"""flash_attn: the package flash-attn. varlen: torch.nn.attention.varlen, FlashAttention-2 as well."""

_DEVICES = ("cuda",)
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_BOUND = 2e-2
"""Relative error of the self-test's values and gradients: several times what bf16 rounds, far below a wrong mask."""


@functools.cache
def reason_against(kernel: FlashKernel, device: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why a kernel cannot run on tensors of that type of device; decided once. Empty where it can."""
    return _missing(kernel, device, dtype, head_dim) or _disagreement(kernel, torch.device(device), dtype, head_dim)


def _missing(kernel: FlashKernel, device: str, dtype: torch.dtype, head_dim: int) -> str:
    if device not in _DEVICES:
        return f"the tensors are on {device}, and it needs {_DEVICES[0]}"
    if dtype not in _DTYPES:
        return f"the tensors are {dtype}, and it needs bfloat16 or float16"
    if head_dim > _LARGEST_HEAD:
        return f"heads are {head_dim} wide, and it takes at most {_LARGEST_HEAD}"
    if kernel == "varlen" and head_dim % 8:
        return f"heads are {head_dim} wide, and it takes multiples of 8"
    if kernel == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return ""


def _disagreement(kernel: FlashKernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What differs from torch's attention in fp32 on a small case; empty where nothing does.

    Values and all gradients with grouped keys: one document a row, packed ones, two of a single token, and windows.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(2, 150, heads, head_dim, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)
    )
    ids = torch.zeros(2, 150, dtype=torch.int32, device=device)
    ids[1, [1, 2, 70]] = 1
    ids = ids.cumsum(1, dtype=torch.int32)
    offsets, visible = find_documents(ids).offsets, visible_tokens(ids)
    cases = {
        "one document a row": (None, None, None),
        "packed": (offsets, None, visible),
        "a window": (offsets, 33, within_window(visible, 33)),
    }
    try:
        for name, (starts, window, seen) in cases.items():
            attention = functools.partial(flash_attention, offsets=starts, window=window, kernel=kernel)
            found = _outcome(attention, (q, k, v), weight)
            wide = (q.float(), k.float(), v.float())
            expected = _outcome(functools.partial(softmax_attention, visible=seen), wide, weight.float())
            for what, actual, truth in zip(("values", "dq", "dk", "dv"), found, expected, strict=True):
                error = float((actual.float() - truth).norm() / truth.norm())
                if not error <= _BOUND:
                    return f"its {what} differ from torch's by {error:.1e} ({name})"
    except (ImportError, OSError, RuntimeError) as error:  # of another torch's build, or without a kernel for this GPU
        return f"it fails: {str(error).partition(chr(10))[0] or type(error).__name__}"
    return ""


def _outcome(attention: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of its product with `weight`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = attention(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, weight)]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, offsets: Tensor | None, window: int | None = None, kernel: FlashKernel
) -> Tensor:
    """Causal attention of whole documents: o_t = sum over visible s of softmax(q_t . k_s / sqrt(K)) v_s, s the tokens
    t - window + 1 .. t of t's document.

    Its gradients are the same bits twice under torch.use_deterministic_algorithms alone.

    Args:
        q: [B, T, H, K] in bf16 or fp16.
        k, v: [B, T, G, K]; query head h reads key-value head h // (H / G).
        offsets: those of `Documents`; None when each row is one document.
        window: visible tokens, the token itself included; None for all.

    Returns:
        [B, T, H, K] in the dtype of q, accumulated in fp32.

    Source: FlashAttention-2.
    """
    batch, length = q.shape[:2]
    reach = (-1 if window is None else window - 1, 0)
    exact = torch.are_deterministic_algorithms_enabled()
    if kernel == "flash_attn":
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

        if offsets is None:
            return flash_attn_func(q, k, v, causal=True, window_size=reach, deterministic=exact)
    if offsets is None:
        offsets = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    # The longest document is not read back from the device: a row's length bounds it.
    sizes = (offsets, offsets, length, length)
    if kernel == "flash_attn":
        output = flash_attn_varlen_func(q, k, v, *sizes, causal=True, window_size=reach, deterministic=exact)
    else:
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(q, k, v, *sizes, window_size=reach)
    return output.unflatten(0, (batch, length))
