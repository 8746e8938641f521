"""Softmax attention by the flash-attn package, where it is installed, runs here and agrees with torch's own."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.ops.softmax_attention import softmax_attention, visible_tokens

AttentionBackend = Literal["auto", "sdpa", "flash_attn"]
"""auto: flash_attn where it can run, else sdpa. sdpa: torch's own. flash_attn: that package (see check_backend)."""

_DEVICES = ("cuda",)
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_BOUND = 2e-2
"""Relative error of the self-test's values and gradients: several times what bf16 rounds, far below a wrong mask."""

_log = logging.getLogger(__name__)


@torch.compiler.assume_constant_result
def uses_flash_attention(backend: AttentionBackend, device: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention of such tensors runs by `flash_attention`; a constant to torch.compile."""
    return backend != "sdpa" and not reason_against(device, dtype, head_dim)


def check_backend(backend: AttentionBackend, device: str, dtype: torch.dtype, head_dim: int, *, field: str) -> None:
    """Raises ConfigError, naming `field`, where flash_attn was asked for and cannot run on such tensors."""
    if backend == "flash_attn" and (reason := reason_against(device, dtype, head_dim)):
        raise ConfigError(f'{field} = "flash_attn" cannot run: {reason}; use "auto" or "sdpa"')


@functools.cache
def reason_against(device: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why flash_attn cannot run on tensors of that type of device; decided and logged once. Empty where it can."""
    reason = _missing(device, dtype, head_dim) or _disagreement(torch.device(device), dtype, head_dim)
    kind = f"softmax attention, {dtype} heads of {head_dim} on {device}"
    _log.info("%s: %s", kind, f"sdpa ({reason})" if reason else "flash_attn")
    return reason


def _missing(device: str, dtype: torch.dtype, head_dim: int) -> str:
    if device not in _DEVICES:
        return f"the tensors are on {device}, and it needs {_DEVICES[0]}"
    if dtype not in _DTYPES:
        return f"the tensors are {dtype}, and it needs bfloat16 or float16"
    if head_dim > _LARGEST_HEAD:
        return f"heads are {head_dim} wide, and it takes at most {_LARGEST_HEAD}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return ""


def _disagreement(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What differs from torch's attention in fp32 on a small case; empty where nothing does.

    Values and all gradients with grouped keys, of one document a row and of packed ones, two of a single token.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(2, 150, heads, head_dim, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)
    )
    packed = torch.zeros(2, 150, dtype=torch.int32, device=device)
    packed[1, [1, 2, 70]] = 1
    packed = packed.cumsum(1, dtype=torch.int32)
    cases = {"one document a row": (None, None), "packed": (document_offsets(packed), visible_tokens(packed))}
    try:
        for name, (offsets, visible) in cases.items():
            found = _outcome(functools.partial(flash_attention, offsets=offsets), (q, k, v), weight)
            wide = (q.float(), k.float(), v.float())
            expected = _outcome(functools.partial(softmax_attention, visible=visible), wide, weight.float())
            for what, actual, truth in zip(("values", "dq", "dk", "dv"), found, expected, strict=True):
                error = float((actual.float() - truth).norm() / truth.norm())
                if not error <= _BOUND:
                    return f"its {what} differ from torch's by {error:.1e} ({name})"
    except (ImportError, OSError, RuntimeError) as error:  # of another torch's build, or without a kernel for this GPU
        return f"flash-attn fails: {str(error).partition(chr(10))[0] or type(error).__name__}"
    return ""


def _outcome(attention: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of its product with `weight`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = attention(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, weight)]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, offsets: Tensor | None) -> Tensor:
    """Causal attention of whole documents: o_t = sum over s <= t of t's document of softmax(q_t . k_s / sqrt(K)) v_s.

    Args:
        q: [B, T, H, K] in bf16 or fp16.
        k, v: [B, T, G, K]; query head h reads key-value head h // (H / G).
        offsets: of `document_offsets`; None when each row is one document.

    Returns:
        [B, T, H, K] in the dtype of q, accumulated in fp32.

    Source: FlashAttention-2.
    """
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

    exact = torch.are_deterministic_algorithms_enabled()
    if offsets is None:
        return flash_attn_func(q, k, v, causal=True, deterministic=exact)
    batch, length = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    # The longest document is not read back from the device: a row's length bounds it.
    output = flash_attn_varlen_func(q, k, v, offsets, offsets, length, length, causal=True, deterministic=exact)
    return output.unflatten(0, (batch, length))


def document_offsets(document_ids: Tensor) -> Tensor:
    """Where documents start among the B T tokens of all rows, then B T: int32 [N + 1].

    N is the number of documents rounded up to a power of 4, the rest being empty documents at the end, so that a
    compiled block meets few sizes. Waits for the device, which alone knows the number; call it outside of blocks.

    Args:
        document_ids: [B, T], non-decreasing along T.
    """
    starts = functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)  # [B, T]
    places = starts.flatten().nonzero()[:, 0].to(torch.int32)
    size = 1
    while size < len(places):
        size *= 4
    return functional.pad(places, (0, size + 1 - len(places)), value=document_ids.numel())
