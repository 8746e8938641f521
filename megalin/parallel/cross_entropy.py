"""Cross entropy of logits that are split by vocabulary over the tensor-parallel axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalin.ops.srmsnorm import compute_dtype
from megalin.parallel.collectives import Axis, all_gather, all_reduce

IGNORED_LABEL = -100
"""A label that takes no part in the loss."""


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
        logits: [B, T, V/tp], this rank's slice of the vocabulary; -inf for rows that are no token.
        labels: [B, T] token ids; IGNORED_LABEL for tokens without a loss.

    Returns:
        [B, T] in at least fp32, equal on every rank; 0 where the label is ignored.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, axis)


def vocab_parallel_argmax(logits: Tensor, axis: Axis) -> Tensor:
    """The likeliest id of each token, the smallest of equals: this rank's logits [..., V/tp] -> [...] on every rank."""
    peak, index = logits.max(-1)
    peaks = all_gather(peak[None], axis, dim=0)  # [tp, ...]
    ids = all_gather(index[None] + axis.rank * logits.shape[-1], axis, dim=0)
    return ids.gather(0, peaks.max(0, keepdim=True).indices)[0]
