"""Cross entropy of logits sharded by vocabulary over the tensor-parallel axis, and fused with the head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.decoding.few_rows import few_row_linear
from megalin.ops.dispatch.backend import Backend
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.linear_cross_entropy import VocabularySlice, choose_backend, fused_linear_cross_entropy
from megalin.parallel.collectives import Axis, all_gather, all_reduce, wait_tensor, wait_tensor_with_grad

IGNORED_LABEL = -100
"""Label of tokens without a loss."""


class TokenScores(NamedTuple):
    """Scores of the labels of a batch."""

    losses: Tensor
    """[B, T] in nats, at least fp32; 0 where the label is ignored."""
    greedy: Tensor
    """[B, T] bool, True where the label is the likeliest id, the smallest of equals; False where it is ignored."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = log sum_v exp(logit_v) - logit_label, by three all-reduces of one number a token: max, sum, target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
        wide = logits.to(compute_dtype(logits))
        peak = all_reduce(wide.amax(-1), axis, operation="max")
        exponential = torch.exp(wide - peak[..., None])
        local_vocab = logits.shape[-1]
        index = labels - axis.rank * local_vocab
        absent = (index < 0) | (index >= local_vocab)
        index = index.masked_fill(absent, 0)[..., None]
        target = wide.gather(-1, index).squeeze(-1).masked_fill(absent, 0.0)
        total = all_reduce(exponential.sum(-1), axis)
        target = all_reduce(target, axis)
        ignored = labels == IGNORED_LABEL
        ctx.save_for_backward((exponential / total[..., None]).to(logits.dtype), index, absent, ignored)
        return (peak + total.log() - target).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probability, index, absent, ignored = ctx.saved_tensors
        target = (~absent).to(probability.dtype)[..., None]
        difference = probability.scatter_add(-1, index, -target)
        scale = grads[0].masked_fill(ignored, 0.0)[..., None]
        return (difference * scale).to(probability.dtype), None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """Loss of each token in nats.

    Args:
        logits: [B, T, V/tp], this rank's slice of the vocabulary; -inf for padding.
        labels: [B, T] token ids; IGNORED_LABEL for tokens without a loss.

    Returns:
        [B, T] in at least fp32, equal on every rank; 0 where the label is ignored.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, axis)


def vocab_parallel_logits(x: Tensor, weight: Tensor, axis: Axis, *, vocab_size: int) -> Tensor:
    """x [..., D] and this rank's rows weight [V/tp, D] -> logits [..., V/tp]; -inf for rows from `vocab_size` on."""
    logits, known = few_row_linear(x, weight), max(vocab_size - axis.rank * len(weight), 0)
    padding = len(weight) - known
    return functional.pad(logits[..., :known], (0, padding), value=float("-inf")) if padding > 0 else logits


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    token_weights: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """sum_t w_t loss_t of the logits x W^T, without a [tokens, vocabulary] tensor where a kernel runs.

    The kernels work through the tokens in chunks: a chunk's logits, one all-gather of three numbers a token, the loss,
    and the gradients at once. So the result can be scaled, but a token's loss in it only by its weight.

    Args:
        x: [..., D], the full tensor on every rank; its gradient is this rank's partial sum.
        weight: [V/tp, D], this rank's rows.
        labels: [...] token ids; IGNORED_LABEL for tokens without a loss.
        token_weights: [...], at least fp32; None: all 1.
        backend: the implementation; compiled ones take fp32, bf16 and fp16.

    Returns:
        [] in at least fp32, equal on every rank.

    Raises:
        KernelError: an explicit backend cannot run.
    """
    choice = choose_backend(x, weight, backend)
    if x.is_cuda and axis.size > 1:
        choice = _common_choice(choice, axis, tuple(weight.shape), x.dtype, x.device)
    if choice == "reference":
        losses = vocab_parallel_cross_entropy(
            vocab_parallel_logits(x, weight, axis, vocab_size=vocab_size), labels, axis
        )
        return (losses if token_weights is None else losses * token_weights).sum()
    first = axis.rank * len(weight)
    token_weights = torch.ones_like(labels, dtype=torch.float32) if token_weights is None else token_weights
    return fused_linear_cross_entropy(
        x.flatten(0, -2),
        weight,
        labels.flatten(),
        vocabulary=VocabularySlice(first, min(max(vocab_size - first, 0), len(weight))),
        ignored_label=IGNORED_LABEL,
        token_weights=token_weights.flatten(),
        gather=lambda statistics: wait_tensor_with_grad(all_gather(statistics[None], axis, dim=0)),
    )


@functools.cache
def _common_choice(choice: str, axis: Axis, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    """The choice for a weight of this shape, or the reference if a rank of the axis has chosen it, as where the kernel
    failed its self-test: its collectives are others. One all-reduce at the first call."""
    fallback = torch.tensor([int(choice == "reference")], dtype=torch.int32, device=device)
    return "reference" if wait_tensor(all_reduce(fallback, axis, operation="max")).item() else choice


def vocab_parallel_argmax(logits: Tensor, axis: Axis) -> Tensor:
    """The likeliest token id, the smallest of equals: this rank's logits [..., V/tp] -> [...] on every rank."""
    peak, index = logits.max(-1)
    peaks = all_gather(peak[None], axis, dim=0)  # [tp, ...]
    ids = all_gather(index[None] + axis.rank * logits.shape[-1], axis, dim=0)
    return ids.gather(0, peaks.max(0, keepdim=True).indices)[0]
