"""Linear + cross entropy in chunks of tokens: the LM head's loss without a [tokens, vocabulary] tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands, static
from megalin.ops.dispatch.self_test import compare, sample

OP = "linear_cross_entropy"
CHUNK_BYTES = 430_000_000
"""Largest chunk of logits. Larger ones gain no speed; the fp32 gradient of the weight, which the backward rounds,
costs more memory than one chunk."""
ALIGNMENT = 128
"""Row stride of a chunk of logits is a multiple of this many elements, for loads of 16 bytes at any vocabulary."""


class VocabularySlice(NamedTuple):
    """Vocabulary ids of the rows of a weight shard."""

    first: int
    """Vocabulary id of the first row."""
    size: int
    """Number of leading rows with a vocabulary id; the others are padding."""


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, ignored_label: int, token_weights: Tensor
) -> Tensor:
    """Reference in plain PyTorch: sum_t w_t (log sum_v exp(z_tv) - z_t,label), z = x W^T over `vocab_size` rows of W.

    Args:
        x: [N, D].
        weight: [V, D]; the first `vocab_size` rows count.
        labels: [N] vocabulary ids; `ignored_label` for tokens without a loss.
        token_weights: [N], at least fp32.

    Returns:
        [] in at least fp32.
    """
    logits = functional.linear(x, weight)[:, :vocab_size]
    losses = functional.cross_entropy(
        logits.to(compute_dtype(logits)), labels, ignore_index=ignored_label, reduction="none"
    )
    return (losses * token_weights).sum()


def choose_backend(x: Tensor, weight: Tensor, backend: Backend) -> str:
    """Chooses the implementation for these tensors: "reference" or "triton".

    Raises:
        KernelError: an explicit backend that cannot run.
    """
    unsupported = ""
    if x.dtype not in KERNEL_DTYPES or x.dtype != weight.dtype:
        unsupported = f"dtypes {x.dtype} and {weight.dtype}"
    elif x.numel() == 0:
        unsupported = "an empty tensor"
    case = (("V", static(weight.shape[0])), ("x", x.dtype))
    return backends.choose(OP, backend, x.device.type, unsupported, case=case)


def _single_slice(statistics: Tensor) -> Tensor:
    return statistics[None]


def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocabulary: VocabularySlice,
    ignored_label: int,
    token_weights: Tensor,
    gather: Callable[[Tensor], Tensor] = _single_slice,
) -> Tensor:
    """Compiled `linear_cross_entropy_reference`; computes gradients in the forward, a chunk at a time.

    The gradient of `x` is that of this slice of the vocabulary only. An unknown label makes the loss infinite.

    Args:
        weight: [V/tp, D], the rows of `vocabulary`, in the dtype of `x`; its gradient accumulates in fp32.
        gather: all-gather of the fp32 statistics of the vocabulary slices, [rows, 3] -> [tp, rows, 3].

    Returns:
        [] fp64. Not twice differentiable.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    check_operands(
        OP,
        {"x": (x, "ND"), "weight": (weight, "VD"), "labels": (labels, "N int"), "token_weights": (token_weights, "N")},
    )
    assert 0 <= vocabulary.size <= weight.shape[0], (vocabulary, weight.shape)
    loss, dx, dweight = _loss_and_gradients(
        x.contiguous(),
        weight.contiguous(),
        labels.contiguous(),
        token_weights.to(torch.float32).contiguous(),
        vocabulary,
        ignored_label,
        gather,
    )
    # A node each: autograd frees the fp32 gradient of the weight before the backward of x allocates.
    if dx is not None:
        loss = _AttachGradient.apply(loss, x, dx)
    return loss if dweight is None else _AttachGradient.apply(loss, weight, dweight)


def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    vocabulary: VocabularySlice,
    ignored_label: int,
    gather: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss [] fp64, dx [N, D] in the dtype of x and dW [V/tp, D] fp32; None for operands without a gradient.

    dz = w (softmax(z) - [label]) overwrites z; dx = dz W; dW += dz^T x.
    """
    from megalin._triton import cross_entropy as kernels

    need_x, need_weight = (torch.is_grad_enabled() and operand.requires_grad for operand in (x, weight))
    x, weight = x.detach(), weight.detach()
    dx = torch.empty_like(x) if need_x else None
    dweight = torch.empty_like(weight, dtype=torch.float32) if need_weight else None
    losses = x.new_empty(len(x), dtype=torch.float32)
    chunk = chunk_rows(weight, len(x))
    stride = -(-len(weight) // ALIGNMENT) * ALIGNMENT
    buffer = x.new_empty(chunk, stride)
    first, columns = vocabulary
    for start in range(0, len(x), chunk):
        rows = slice(start, min(start + chunk, len(x)))
        logits = buffer[: rows.stop - start, : len(weight)]  # [rows, V/tp]
        torch.mm(x[rows], weight.t(), out=logits)
        statistics = gather(kernels.statistics(logits, labels[rows], first=first, columns=columns))
        kernels.losses_and_gradient(
            logits,
            labels[rows],
            token_weights[rows],
            statistics,
            losses[rows],
            first=first,
            columns=columns,
            ignored_label=ignored_label,
            differentiate=need_x or need_weight,
        )
        if dx is not None:
            torch.mm(logits, weight, out=dx[rows])
        if dweight is not None:
            _add_matmul(dweight, logits, x[rows], overwrite=start == 0)
    return losses.sum(dtype=torch.float64), dx, dweight


class _AttachGradient(torch.autograd.Function):
    """Identity on the loss that gives `operand` the gradient grad_loss * `gradient`, computed with the loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, operand: Tensor, gradient: Tensor) -> Tensor:
        ctx.dtype = operand.dtype
        ctx.save_for_backward(gradient)
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from megalin._triton.cross_entropy import scaled

        (gradient,) = ctx.saved_tensors
        return grads[0], scaled(gradient, grads[0], ctx.dtype), None


def chunk_rows(weight: Tensor, rows: int) -> int:
    """Tokens a chunk: a power of two, which fills the GPU's multiprocessors best, within `CHUNK_BYTES` of logits."""
    most = max(128, CHUNK_BYTES // (len(weight) * weight.element_size()))
    return min(rows, 1 << (most.bit_length() - 1))


def _add_matmul(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool) -> None:
    """Accumulates total [V, D] fp32 (+)= left [rows, V]^T right [rows, D] in fp32."""
    beta = 0 if overwrite else 1
    if left.dtype == torch.float32:
        torch.addmm(total, left.t(), right, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, left.t(), right, beta=beta, out_dtype=torch.float32, out=total)
    else:  # out_dtype is supported on CUDA only
        torch.addmm(total, left.t().float(), right.float(), beta=beta, out=total)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """At the number of rows of the weight, some of which are padding; their width is not the kernels' concern."""
    rows, inner, dtype = case["V"], 16, case["x"]
    known = max(rows - 10, 1)
    labels = torch.arange(16, device=device) * (known - 1) // 15
    labels[2] = -100
    token_weights = sample(16, device=device, seed=2).abs() + 0.5
    weight = sample(rows, inner, device=device, seed=1) / inner**0.5

    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        vocabulary = VocabularySlice(0, known)
        return fused_linear_cross_entropy(
            x, weight, labels, vocabulary=vocabulary, ignored_label=-100, token_weights=token_weights
        )

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy_reference(
            x, weight, labels, vocab_size=known, ignored_label=-100, token_weights=token_weights.double()
        )

    return compare(kernel, reference, [sample(16, inner, device=device, dtype=dtype), weight.to(dtype)])


backends.register(OP, ("triton",), _self_test)
