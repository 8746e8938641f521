"""Causal softmax attention within documents by FlashAttention: torch's own kernels, or those of the packages flash-attn
and flash-attn-4, with a self-test against attention under a mask."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.attention import flash4
from megalin.ops.attention.softmax import softmax_attention, visible_tokens, within_window
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.documents import UNPACKED, PackedDocuments, find_documents

FlashKernel = Literal["torch", "flash_attn", "flash_attn_4"]
"""torch: the kernel of PyTorch. flash_attn: the package flash-attn. Both are FlashAttention-2. flash_attn_4: the
package flash-attn-4, whose kernels are written for compute capability 9.0 and above."""

_DEVICES = ("cuda",)
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_BOUND = 2e-2
"""Bound on the self-test's relative error: several times the rounding of bf16, far below that of a wrong mask."""


@functools.cache
def unavailable_reason(kernel: FlashKernel, device: str, dtype: torch.dtype, head_dim: int, group: int = 1) -> str:
    """Reason that a kernel cannot run on tensors of this device type, with `group` query heads a key-value head; found
    once, empty where it can."""
    missing = _missing(kernel, device, dtype, head_dim)
    return missing or _disagreement(kernel, torch.device(device), dtype, head_dim, group)


def _missing(kernel: FlashKernel, device: str, dtype: torch.dtype, head_dim: int) -> str:
    if device not in _DEVICES:
        return f"the tensors are on {device}, but it needs {_DEVICES[0]}"
    if dtype not in _DTYPES:
        return f"the tensors are {dtype}, but it needs bfloat16 or float16"
    if head_dim > _LARGEST_HEAD:
        return f"head dimension {head_dim} is above its limit of {_LARGEST_HEAD}"
    if kernel != "flash_attn" and head_dim % 8:
        return f"head dimension {head_dim} is not a multiple of 8"
    if kernel != "torch" and not is_installed(package := kernel.replace("_", "-")):
        return f"the package {package} is not installed"
    if kernel == "flash_attn_4" and (capability := torch.cuda.get_device_capability()) < flash4.LOWEST:
        return "compute capability {}.{} is below {}.{}".format(*capability, *flash4.LOWEST)
    return ""


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a distribution is installed. Modules do not show it: both packages give parts of flash_attn."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.distribution(package))
    return False


def slower_reason(kernel: FlashKernel, device: str, *, is_short: bool) -> str:
    """Reason that "auto" leaves a call to torch's kernels though this one is installed; empty where it does not.

    Args:
        is_short: sequences of one document, of less than `flash4.LONG` tokens.
    """
    if kernel != "flash_attn_4" or device not in _DEVICES or not is_installed("flash-attn-4"):
        return ""
    if is_short:
        return f"sequences of less than {flash4.LONG:,} tokens"
    if (capability := torch.cuda.get_device_capability()) == flash4.MEASURED:
        return ""
    measured = "{}.{} alone, not on {}.{}".format(*flash4.MEASURED, *capability)
    return f'it was measured on compute capability {measured}; backend = "flash_attn_4" takes it'


def _disagreement(kernel: FlashKernel, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> str:
    """Largest difference from torch's fp32 attention on a small case, as text; empty where it is within bounds.

    Compares values and all gradients, with two key-value heads: one document per sequence, packed documents, two of a
    single token, and windows.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(2, 150, heads, head_dim, generator=generator).to(device, dtype)
        for heads in (2 * group, 2, 2, 2 * group)
    )
    ids = torch.zeros(2, 150, dtype=torch.int32, device=device)
    ids[1, [1, 2, 70]] = 1
    ids = ids.cumsum(1, dtype=torch.int32)
    packed, visible = find_documents(ids), visible_tokens(ids)
    cases = {
        "one document per sequence": (UNPACKED, None, None),
        "packed": (packed, None, visible),
        "a window": (packed, 33, within_window(visible, 33)),
    }
    try:
        for name, (documents, window, mask) in cases.items():
            attention = functools.partial(flash_attention, documents=documents, window=window, kernel=kernel)
            found = _output_and_gradients(attention, (q, k, v), weight)
            wide = (q.float(), k.float(), v.float())
            expected = _output_and_gradients(functools.partial(softmax_attention, visible=mask), wide, weight.float())
            for what, actual, truth in zip(("values", "dq", "dk", "dv"), found, expected, strict=True):
                error = float((actual.float() - truth).norm() / truth.norm())
                if not error <= _BOUND:
                    return f"its {what} differ from torch's by {error:.1e} ({name})"
    except _failures(kernel) as error:  # built for another torch, or without a kernel for this GPU
        return f"it fails: {str(error).partition(chr(10))[0] or type(error).__name__}"
    return ""


def _failures(kernel: FlashKernel) -> tuple[type[Exception], ...]:
    """Errors of a kernel that cannot run; other versions of a package, and its compiler, may raise any."""
    return (OSError, RuntimeError) if kernel == "torch" else (Exception,)


def _output_and_gradients(
    attention: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], weight: Tensor
) -> list[Tensor]:
    """Output, and the gradients of sum(output * weight)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    # A caller's hooks would recompute the tensors of this backward: in a block that is being compiled, for ever.
    own = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
    with torch.enable_grad(), own:
        output = attention(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, weight)]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, documents: PackedDocuments, window: int | None = None, kernel: FlashKernel
) -> Tensor:
    """Causal attention within documents: o_t = sum over visible s of softmax(q_t . k_s / sqrt(K)) v_s, s the tokens
    t - window + 1 .. t of t's document.

    Gradients are deterministic only under torch.use_deterministic_algorithms.

    Args:
        q: [B, T, H, K] in bf16 or fp16.
        k, v: [B, T, G, K]; query head h reads key-value head h // (H / G).
        documents: from `find_documents`, or one document per sequence.
        window: visible tokens, including the token itself; None for all.

    Returns:
        [B, T, H, K] in the dtype of q, accumulated in fp32.

    Source: FlashAttention-2, and its successors for newer GPUs.
    """
    assert (documents.ids is None) == (documents.offsets is None), "documents have ids but no offsets"
    if kernel != "flash_attn":
        return _forward(q, k, v, documents.offsets, documents.sizes, window or 0, kernel == "flash_attn_4")[0]
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

    exact = torch.are_deterministic_algorithms_enabled()
    options = {"causal": True, "window_size": (window - 1 if window else -1, 0), "deterministic": exact}
    if documents.offsets is None:
        return flash_attn_func(q, k, v, **options)
    batch, length = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    # Compiled blocks may not depend on the longest document's length; the sequence length bounds it.
    output = flash_attn_varlen_func(q, k, v, documents.offsets, documents.offsets, length, length, **options)
    return output.unflatten(0, (batch, length))


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads = q.shape[:3]
    return q.new_empty(q.shape), q.new_empty(heads, batch * length, dtype=torch.float32)


@custom_op("document_attention", _fake_forward)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor | None, sizes: Tensor | None, window: int, four: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, K] and log-sum-exp [H, B T], by torch's kernel or, with `four`, by flash-attn-4's; window 0
    means none.

    A custom op because a graph may not depend on the number of documents and the longest length: with upper bounds
    instead, a kernel runs up to twice as long.
    """
    starts, longest = _extent(q, offsets, sizes, window)
    attend = flash4.attend if four else _attend
    output, sums = attend(_tokens(q), _tokens(k), _tokens(v), starts, longest, window)
    return output.view(q.shape), sums


@custom_op("document_attention_backward", lambda dy, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:3]))
def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    offsets: Tensor | None,
    sizes: Tensor | None,
    window: int,
    four: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    starts, longest = _extent(q, offsets, sizes, window)
    if torch.are_deterministic_algorithms_enabled() and not four:
        starts = _with_one_sum(starts, q)
    shapes = q.shape, k.shape, v.shape
    dy, q, k, v, output = map(_tokens, (dy.contiguous(), q, k, v, output))
    attend_backward = flash4.attend_backward if four else _attend_backward
    dq, dk, dv = attend_backward(dy, q, k, v, output, sums, starts, longest, window)
    return dq.view(shapes[0]), dk.view(shapes[1]), dv.view(shapes[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.four = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, offsets, sizes, output, sums = ctx.saved_tensors
    return *_backward(dy, q, k, v, output, sums, offsets, sizes, ctx.window, ctx.four), None, None, None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _tokens(x: Tensor) -> Tensor:
    """x [B, T, H, K] as [N, H, K], with the contiguous last dimension that the kernels ask for."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, 1)


def _extent(q: Tensor, offsets: Tensor | None, sizes: Tensor | None, window: int) -> tuple[Tensor, int]:
    """Cumulative sequence lengths (each document's start and the last one's end), and a bound on the longest length.

    The kernel takes documents of one token for a decoding step, for which their number must be exact: the bound is at
    least 2. It takes a window that is longer than all documents for none. So that the same code runs whatever the
    bound, the latter is no shorter than the window under torch.use_deterministic_algorithms.
    """
    batch, length = q.shape[:2]
    if offsets is None or sizes is None:
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q.device), length
    count, longest = sizes.tolist()
    if torch.are_deterministic_algorithms_enabled():
        longest = max(longest, window)
    return offsets[: count + 1], min(max(longest, 2), length)


def _with_one_sum(starts: Tensor, q: Tensor) -> Tensor:
    """Cumulative sequence lengths with empty documents at the end, so many that the deterministic backward on q
    [B, T, H, K] adds the gradients of queries in one order, however many documents `starts` has.

    With fewer documents times heads than multiprocessors it adds parts of them, in a number that depends on both.
    """
    if not q.is_cuda:
        return starts
    least = -(-torch.cuda.get_device_properties(q.device).multi_processor_count // q.shape[2])
    return functional.pad(starts, (0, max(least + 1 - len(starts), 0)), value=q.shape[0] * q.shape[1])


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int) -> tuple[Tensor, Tensor]:
    """Calls torch.nn.attention.varlen's kernel over tokens [N, H or G, K]; inside an op it has no autograd."""
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, not window, False, **_window_sizes(window)
    )
    return output.contiguous(), sums


def _attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: Tensor,
    starts: Tensor,
    longest: int,
    window: int,
) -> tuple[Tensor, ...]:
    no_dropout, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    sizes = (starts, starts, longest, longest, 0.0, not window)
    found = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, output, sums, *sizes, no_dropout, unused, **_window_sizes(window)
    )
    return tuple(x.contiguous() for x in found)


def _window_sizes(window: int) -> dict[str, int]:
    """Numbers of visible tokens to the left and right, -1 for all."""
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if window else -1}
